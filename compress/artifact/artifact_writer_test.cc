#include "compress/artifact/artifact_writer.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <memory>
#include <span>

#include "base/status_macros.h"
#include "base/status_matchers.h"
#include "compress/artifact/random_checkpoint.h"
#include "compress/artifact/safetensors_writer.h"
#include "compress/tensors/tensor_loader.h"
#include "compress/testing/folder_fixture.h"
#include "model/shapes/attention_shape.h"
#include "plan/plan.h"

namespace kvasir::compress {
namespace {

namespace fs = std::filesystem;

using ::kvasir::base::StatusIs;
using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;

bool GoOn(const ArtifactProgress&) { return true; }

class ArtifactWriterTest : public FolderTest {
 protected:
  void SetUp() override {
    RandomCheckpointOptions options;
    options.shape = {.name = "small",
                     .num_layers = 2,
                     .hidden_size = 24,
                     .intermediate_size = 40,
                     .num_query_heads = 4,
                     .num_kv_heads = 2,
                     .head_dim = 6,
                     .vocab_size = 50,
                     .max_position = 64};
    options.out = folder_ / "base";
    KVASIR_ASSERT_OK(WriteRandomCheckpoint(
        options, [](const RandomCheckpointProgress&) { return true; }));
    std::ofstream(options.out / "tokenizer.json") << "{}";
    auto base = model::Checkpoint::Open(options.out.string());
    KVASIR_ASSERT_OK(base.status());
    base_ = std::make_unique<model::Checkpoint>(*std::move(base));
    plan_ = plan::FullRankPlan(model::AttentionShapeOf(base_->spec()),
                               kvasir::v1::BF16);
    options_.out = folder_ / "out";
  }

  // Returns the base model's attention tensors of a layer, unchanged.
  absl::StatusOr<TensorMap> Source(int64_t layer) const {
    KVASIR_ASSIGN_OR_RETURN(TensorMap all, LoadLayer(*base_, layer));
    TensorMap attention;
    for (auto& [name, tensor] : all) {
      if (name.rfind("self_attn.", 0) == 0) attention[name] = tensor;
    }
    return attention;
  }

  absl::Status Write(const std::function<bool(const ArtifactProgress&)>&
                         on_progress = GoOn) const {
    return WriteArtifact(
        *base_, plan_, options_, [&](int64_t l) { return Source(l); },
        on_progress);
  }

  // Returns the names of the files and folders that a run has left next to the
  // base model.
  std::vector<std::string> Left() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      if (entry.path().filename() != "base") {
        names.push_back(entry.path().filename());
      }
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  // Sets the bf16 bits of the number at row 1, column 2 of a matrix, or at
  // index 2 of a vector.
  void SetWeight(const std::string& tensor, uint16_t bits) const {
    const model::TensorInfo& info = *base_->tensors().Find(tensor)->info;
    ASSERT_EQ(info.type, model::TensorType::kBF16);
    const int64_t index = info.shape.size() == 1 ? 2 : info.shape.back() + 2;
    const fs::path path = folder_ / "base" / "model.safetensors";
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    uint64_t header_bytes = 0;
    file.read(reinterpret_cast<char*>(&header_bytes), sizeof(header_bytes));
    file.seekp(static_cast<std::streamoff>(
        sizeof(header_bytes) + header_bytes + info.begin_bytes +
        static_cast<uint64_t>(index) * sizeof(bits)));
    file.write(reinterpret_cast<const char*>(&bits), sizeof(bits));
    ASSERT_TRUE(file.good());
  }

  void ExpectEqualToBase(const fs::path& out) const {
    auto written = model::Checkpoint::Open(out.string());
    KVASIR_ASSERT_OK(written.status());
    EXPECT_EQ(written->tensors().entries().size(),
              base_->tensors().entries().size());
    for (const auto& [name, entry] : base_->tensors().entries()) {
      const auto* copy = written->tensors().Find(name);
      ASSERT_NE(copy, nullptr) << name;
      EXPECT_EQ(copy->info->type, entry.info->type) << name;
      ASSERT_EQ(copy->info->shape, entry.info->shape) << name;
      std::vector<std::byte> want(entry.info->size_bytes);
      std::vector<std::byte> have(entry.info->size_bytes);
      KVASIR_ASSERT_OK(entry.file->Read(*entry.info, 0, want));
      KVASIR_ASSERT_OK(copy->file->Read(*copy->info, 0, have));
      EXPECT_TRUE(have == want) << name;
    }
  }

  std::unique_ptr<model::Checkpoint> base_;
  kvasir::v1::KvPlan plan_;
  ArtifactOptions options_;
};

// GPT-NeoX fuses queries, keys and values, and OPT has other tensor names. In
// the artifact, attention tensors have the names of docs/artifact.md. All other
// tensors are copied as they are stored.
TEST_F(ArtifactWriterTest,
       TensorsOutsideAttentionKeepTheirNamesInEveryModelFamily) {
  for (const model::Family family :
       {model::Family::kNeox, model::Family::kOpt}) {
    RandomCheckpointOptions options;
    options.shape = {.name = "small",
                     .family = family,
                     .num_layers = 2,
                     .hidden_size = 24,
                     .intermediate_size = 40,
                     .num_query_heads = 4,
                     .num_kv_heads = 4,
                     .head_dim = 6,
                     .vocab_size = 50,
                     .max_position = 64,
                     .rotary_part = family == model::Family::kOpt ? 0.0 : 0.34,
                     .qkv_bias = true};
    options.out = folder_ / "base";
    options.overwrite = true;
    KVASIR_ASSERT_OK(WriteRandomCheckpoint(
        options, [](const RandomCheckpointProgress&) { return true; }));
    auto base = model::Checkpoint::Open(options.out.string());
    KVASIR_ASSERT_OK(base.status());
    base_ = std::make_unique<model::Checkpoint>(*std::move(base));
    plan_ = plan::FullRankPlan(model::AttentionShapeOf(base_->spec()),
                               kvasir::v1::BF16);
    options_.overwrite = true;
    KVASIR_ASSERT_OK(Write());
    ExpectEqualToBase(options_.out);
    auto written = model::Checkpoint::Open(options_.out.string());
    KVASIR_ASSERT_OK(written.status());
    const model::TensorStore::Entries& stored = written->tensors().stored();
    EXPECT_EQ(stored.count("model.layers.1.self_attn.k_proj.weight"), 1u);
    for (const auto& [name, entry] : base_->tensors().stored()) {
      const bool attention = name.find("attention.") != name.npos ||
                             name.find("self_attn.") != name.npos;
      EXPECT_EQ(stored.count(name), attention ? 0u : 1u) << name;
    }
  }
}

TEST_F(ArtifactWriterTest,
       APlanOfWholeKeysAndValuesWritesTheBaseModelsTensorsBitByBit) {
  KVASIR_ASSERT_OK(Write());
  EXPECT_EQ(Left(), std::vector<std::string>{"out"});
  ExpectEqualToBase(options_.out);
  EXPECT_EQ(ReadFile(options_.out / "kv_plan.json"), plan::PlanToJson(plan_));
  EXPECT_EQ(ReadFile(options_.out / "config.json"),
            ReadFile(folder_ / "base" / "config.json"));
  EXPECT_EQ(ReadFile(options_.out / "tokenizer.json"), "{}");
  EXPECT_FALSE(fs::exists(options_.out / "kvasir-compress.unfinished"));
  EXPECT_FALSE(fs::exists(options_.out / "kv_plan.prediction.json"));
}

TEST_F(ArtifactWriterTest, TheHeaderHasRoomForAllTensorsOfJointParts) {
  for (kvasir::v1::LayerPlan& layer : *plan_.mutable_layers()) {
    layer.clear_key();
    layer.clear_value();
    kvasir::v1::Part* part = layer.add_joint();
    for (uint32_t head = 0; head < 2; ++head) {
      auto* group = part->mutable_low_rank()->add_groups();
      group->add_heads(head);
      group->set_rank(4);
    }
    part->set_stored(kvasir::v1::PRE_ROPE);
    part->mutable_codec()->set_dtype(kvasir::v1::BF16);
    part->add_uses()->mutable_reconstruct();
    part->mutable_uses(0)->set_serves(kvasir::v1::SERVES_KEY);
    part->add_uses()->mutable_reconstruct();
    part->mutable_uses(1)->set_serves(kvasir::v1::SERVES_VALUE);
  }
  const auto source = [&](int64_t layer) -> absl::StatusOr<TensorMap> {
    KVASIR_ASSIGN_OR_RETURN(TensorMap tensors, Source(layer));
    tensors.erase("self_attn.k_proj.weight");
    tensors.erase("self_attn.v_proj.weight");
    tensors["self_attn.kv_proj.down.weight"] = at::ones({8, 24});
    for (const char* group : {"0", "1"}) {
      for (const char* side : {"up_key.", "up_value."}) {
        tensors[absl::StrCat("self_attn.kv_proj.", side, group, ".weight")] =
            at::ones({6, 4});
      }
    }
    return tensors;
  };
  KVASIR_EXPECT_OK(WriteArtifact(*base_, plan_, options_, source, GoOn));
}

TEST_F(ArtifactWriterTest, ThePredictionIsWrittenBesideThePlan) {
  options_.prediction = "{\"kl\": 0.5}\n";
  KVASIR_ASSERT_OK(Write());
  EXPECT_EQ(ReadFile(options_.out / "kv_plan.prediction.json"),
            *options_.prediction);
  ExpectEqualToBase(options_.out);
}

TEST_F(ArtifactWriterTest, SeveralShardsHoldTheSameTensorsAsOneFile) {
  options_.max_shard_bytes = 4000;
  KVASIR_ASSERT_OK(Write());
  EXPECT_FALSE(fs::exists(options_.out / "model.safetensors"));
  EXPECT_TRUE(fs::exists(options_.out / "model.safetensors.index.json"));
  ExpectEqualToBase(options_.out);
}

// plan_ compresses nothing, so all tensors equal those of the base model and
// only links are written. If one tensor differs, a file with only this tensor
// is added.
TEST_F(ArtifactWriterTest,
       IfLinkBaseIsSetTensorsThatEqualTheBaseModelsAreLinkedNotCopied) {
  options_.link_base = true;
  KVASIR_ASSERT_OK(Write());
  ExpectEqualToBase(options_.out);
  EXPECT_FALSE(fs::exists(options_.out / "model.safetensors"));
  for (const char* link : {"base-model.safetensors", "tokenizer.json"}) {
    EXPECT_TRUE(fs::read_symlink(options_.out / link).is_relative()) << link;
  }

  const std::string changed = "model.layers.1.self_attn.k_proj.weight";
  options_.overwrite = true;
  KVASIR_ASSERT_OK(WriteArtifact(
      *base_, plan_, options_,
      [&](int64_t layer) -> absl::StatusOr<TensorMap> {
        KVASIR_ASSIGN_OR_RETURN(TensorMap tensors, Source(layer));
        at::Tensor& keys = tensors["self_attn.k_proj.weight"];
        if (layer == 1) keys = keys + 1.0;
        return tensors;
      },
      GoOn));
  KVASIR_ASSERT_OK_AND_ASSIGN(const model::Checkpoint written,
                              model::Checkpoint::Open(options_.out.string()));
  for (const auto& [name, entry] : written.tensors().stored()) {
    EXPECT_EQ(fs::path(entry.file->path()).filename(),
              name == changed ? "model.safetensors" : "base-model.safetensors")
        << name;
  }
  EXPECT_LT(fs::file_size(options_.out / "model.safetensors"),
            fs::file_size(folder_ / "base" / "model.safetensors"));

  // The artifact must still open after both folders have moved to another
  // place.
  const fs::path moved = folder_ / "moved";
  fs::create_directory(moved);
  fs::rename(folder_ / "base", moved / "base");
  fs::rename(options_.out, moved / "out");
  KVASIR_EXPECT_OK(model::Checkpoint::Open((moved / "out").string()).status());

  // The base model changes as if it had been trained further: same shapes,
  // other numbers. The links must then be refused.
  const fs::path weights = moved / "base" / "model.safetensors";
  const auto size = static_cast<std::streamoff>(fs::file_size(weights));
  std::fstream(weights, std::ios::in | std::ios::out | std::ios::binary)
      .seekp(size - 1)
      .put('\x7e');
  EXPECT_THAT(model::Checkpoint::Open((moved / "out").string()).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("base-model.safetensors: this is not")));
}

// If a tensor of the base model cannot be read, the writer cannot know that the
// new tensor is equal, so it must not link the tensor.
TEST_F(ArtifactWriterTest, ABaseModelThatIsTruncatedDuringTheRunIsNotLinked) {
  options_.link_base = true;
  const auto cut_short = [&](int64_t layer) -> absl::StatusOr<TensorMap> {
    KVASIR_ASSIGN_OR_RETURN(TensorMap tensors, Source(layer));
    if (layer == 1) fs::resize_file(folder_ / "base" / "model.safetensors", 16);
    return tensors;
  };
  EXPECT_THAT(
      WriteArtifact(*base_, plan_, options_, cut_short, GoOn),
      StatusIs(absl::StatusCode::kDataLoss,
               AllOf(HasSubstr("model.layers.1.self_attn.k_proj.weight"),
                     HasSubstr("model.safetensors"))));
  EXPECT_TRUE(Left().empty());
}

TEST_F(ArtifactWriterTest, AttentionTensorsHaveTheRequestedType) {
  options_.dtype = model::TensorType::kF32;
  KVASIR_ASSERT_OK(Write());
  auto written = model::Checkpoint::Open(options_.out.string());
  KVASIR_ASSERT_OK(written.status());
  auto type = [&](const char* name) {
    return written->tensors().Find(name)->info->type;
  };
  EXPECT_EQ(type("model.layers.1.self_attn.k_proj.weight"),
            model::TensorType::kF32);
  EXPECT_EQ(type("model.layers.1.mlp.up_proj.weight"),
            model::TensorType::kBF16);
}

TEST_F(ArtifactWriterTest, AnInterruptedRunLeavesNoFiles) {
  EXPECT_THAT(
      Write([](const ArtifactProgress& p) { return p.layers < 1; }),
      StatusIs(absl::StatusCode::kCancelled, HasSubstr("was not written")));
  EXPECT_TRUE(Left().empty());
}

TEST_F(ArtifactWriterTest, TheArtifactFolderAppearsOnlyWhenItIsComplete) {
  KVASIR_ASSERT_OK(Write([&](const ArtifactProgress&) {
    EXPECT_EQ(Left(), std::vector<std::string>{"out.partial"});
    return true;
  }));
}

TEST_F(ArtifactWriterTest, AnErrorOfTheTensorSourceIsReportedAndLeavesNoFiles) {
  EXPECT_THAT(WriteArtifact(
                  *base_, plan_, options_,
                  [](int64_t) -> absl::StatusOr<TensorMap> {
                    return absl::InvalidArgumentError("layer 0: NaN");
                  },
                  GoOn),
              StatusIs(absl::StatusCode::kInvalidArgument, "layer 0: NaN"));
  EXPECT_TRUE(Left().empty());
}

TEST_F(ArtifactWriterTest, ANumberThatTheRequestedTypeCannotHoldIsRefused) {
  options_.dtype = model::TensorType::kF16;
  EXPECT_THAT(WriteArtifact(
                  *base_, plan_, options_,
                  [&](int64_t layer) -> absl::StatusOr<TensorMap> {
                    KVASIR_ASSIGN_OR_RETURN(TensorMap tensors, Source(layer));
                    tensors["self_attn.v_proj.weight"][0][0].fill_(1e6);
                    return tensors;
                  },
                  GoOn),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       EndsWith("layers.0.self_attn.v_proj.weight: a number "
                                "becomes infinite or NaN when stored as F16")));
  EXPECT_TRUE(Left().empty());
}

TEST_F(ArtifactWriterTest, CopiedTensorsMustBeFinite) {
  // SetWeight changes the number at row 1, column 2 of a matrix, or at index 2
  // of a vector. Errors give the row of a vector as 0.
  struct Case {
    const char* tensor;
    uint16_t bits;
    const char* text;
  };
  for (const Case& c :
       {Case{"model.embed_tokens.weight", 0x7fc0, "row 1, column 2"},
        Case{"model.norm.weight", 0xff80, "row 0, column 2"},
        Case{"model.layers.1.mlp.down_proj.weight", 0x7f80,
             "row 1, column 2"}}) {
    SetWeight(c.tensor, c.bits);
    for (const bool link_base : {false, true}) {
      options_.link_base = link_base;
      EXPECT_THAT(Write(),
                  StatusIs(absl::StatusCode::kInvalidArgument,
                           AllOf(HasSubstr(c.tensor), HasSubstr(c.text),
                                 HasSubstr("must be finite"))));
      EXPECT_TRUE(Left().empty());
    }
    SetWeight(c.tensor, 0);
  }
  KVASIR_EXPECT_OK(Write());
}

// Some checkpoints store a mask tensor that holds -infinity in fp16. No decoder
// reads it.
TEST_F(ArtifactWriterTest, TensorsThatNoDecoderReadsMayHoldInfiniteNumbers) {
  constexpr char kMask[] = "model.layers.0.masked_bias";
  std::vector<TensorEntry> entries;
  for (const auto& [name, entry] : base_->tensors().stored()) {
    entries.push_back({name, entry.info->type, entry.info->shape});
  }
  entries.push_back({kMask, model::TensorType::kF16, {}});
  const fs::path file = folder_ / "base" / "more";
  KVASIR_ASSERT_OK_AND_ASSIGN(SafetensorsWriter writer,
                              SafetensorsWriter::Create(file, entries));
  for (const auto& [name, entry] : base_->tensors().stored()) {
    std::vector<std::byte> bytes(entry.info->size_bytes);
    KVASIR_ASSERT_OK(entry.file->Read(*entry.info, 0, bytes));
    KVASIR_ASSERT_OK(writer.Append(bytes));
  }
  const uint16_t minus_infinity = 0xfc00;
  KVASIR_ASSERT_OK(writer.Append(std::as_bytes(std::span(&minus_infinity, 1))));
  KVASIR_ASSERT_OK(writer.Finish());
  fs::rename(file, folder_ / "base" / "model.safetensors");
  auto base = model::Checkpoint::Open((folder_ / "base").string());
  KVASIR_ASSERT_OK(base.status());
  *base_ = *std::move(base);
  KVASIR_ASSERT_OK(Write());
  ExpectEqualToBase(options_.out);
  EXPECT_TRUE(base_->tensors().stored().contains(kMask));
}

TEST_F(ArtifactWriterTest, APlanForAnotherModelIsRefused) {
  plan_.add_layers()->CopyFrom(plan_.layers(0));
  EXPECT_THAT(Write(), StatusIs(absl::StatusCode::kInvalidArgument,
                                HasSubstr("number of layers is 3")));
  EXPECT_TRUE(Left().empty());
}

TEST_F(ArtifactWriterTest,
       AnArtifactWhoseTensorsDoNotFitThePlanIsNotGivenItsFinalName) {
  EXPECT_THAT(WriteArtifact(
                  *base_, plan_, options_,
                  [&](int64_t layer) -> absl::StatusOr<TensorMap> {
                    KVASIR_ASSIGN_OR_RETURN(TensorMap tensors, Source(layer));
                    tensors.erase("self_attn.v_proj.weight");
                    return tensors;
                  },
                  GoOn),
              StatusIs(absl::StatusCode::kInternal,
                       HasSubstr("self_attn.v_proj.weight")));
  EXPECT_TRUE(Left().empty());
}

TEST_F(ArtifactWriterTest, AnExistingFolderIsReplacedOnlyWithOverwrite) {
  KVASIR_ASSERT_OK(Write());
  std::ofstream(options_.out / "mine") << "x";
  EXPECT_THAT(Write(), StatusIs(absl::StatusCode::kAlreadyExists,
                                HasSubstr("--overwrite")));
  EXPECT_TRUE(fs::exists(options_.out / "mine"));
  options_.overwrite = true;
  KVASIR_ASSERT_OK(Write());
  EXPECT_FALSE(fs::exists(options_.out / "mine"));
  EXPECT_EQ(Left(), std::vector<std::string>{"out"});
}

TEST_F(ArtifactWriterTest,
       AnOutputFolderThatIsOrContainsAnInputFolderIsNeverReplaced) {
  options_.out = folder_ / "base";
  options_.overwrite = true;
  EXPECT_THAT(Write(), StatusIs(absl::StatusCode::kInvalidArgument,
                                HasSubstr("is an input")));
  // These files make the parent folder look like a checkpoint that may be
  // replaced.
  std::ofstream(folder_ / "config.json") << "{}";
  std::ofstream(folder_ / "model.safetensors") << "x";
  options_.out = folder_ / "base" / "..";
  EXPECT_THAT(CheckArtifactOutput(*base_, options_),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("holds the input")));
  fs::create_directories(folder_ / "out" / "words");
  options_.out = folder_ / "out";
  options_.tokenizer = folder_ / "out" / "words";
  EXPECT_THAT(CheckArtifactOutput(*base_, options_),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("holds the input")));
  EXPECT_TRUE(fs::exists(folder_ / "out" / "words"));
}

TEST_F(ArtifactWriterTest, ACompressedBaseModelIsRefused) {
  KVASIR_ASSERT_OK(Write());
  auto compressed = model::Checkpoint::Open(options_.out.string());
  KVASIR_ASSERT_OK(compressed.status());
  options_.out = folder_ / "again";
  EXPECT_THAT(CheckArtifactOutput(*compressed, options_),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("is already compressed")));
}

TEST_F(ArtifactWriterTest,
       AnOutputFolderThatCannotBeWrittenIsReportedBeforeTheWorkStarts) {
  std::ofstream(folder_ / "file") << "x";
  options_.out = folder_ / "file" / "out";
  EXPECT_THAT(
      CheckArtifactOutput(*base_, options_),
      StatusIs(absl::StatusCode::kUnavailable, HasSubstr("cannot create")));
  options_.out = folder_ / "out/";
  KVASIR_ASSERT_OK(CheckArtifactOutput(*base_, options_));
  std::vector<std::string> left = Left();
  EXPECT_EQ(left, std::vector<std::string>{"file"});
}

}  // namespace
}  // namespace kvasir::compress
