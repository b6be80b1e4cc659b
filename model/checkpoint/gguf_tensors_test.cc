#include "model/checkpoint/gguf_tensors.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_matchers.h"
#include "base/temp_folder.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/gguf_folder.h"
#include "model/gguf/testing/gguf_builder.h"
#include "nlohmann/json.hpp"

namespace kvasir::model {
namespace {

using base::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string GoldenModel(const std::string& name) {
  const char* source = std::getenv("KVASIR_SOURCE_DIR");
  return absl::StrCat(source == nullptr ? "." : source, "/tests/golden/models/",
                      name);
}

uint32_t GgmlTypeOf(TensorType type) {
  return type == TensorType::kF32 ? 0 : type == TensorType::kF16 ? 1 : 30;
}

// A golden model, and the architecture in its GGUF file. `theta` is the base of
// RoPE; if it is 0, the model has no RoPE scaling, and the base is computed
// from its frequencies.
struct Model {
  std::string name;
  std::string architecture;
  double theta = 0;
};

double ThetaOf(const RopeSpec& rope) {
  // The frequency of pair 1 is theta^(-2/D).
  return std::round(
      std::pow(rope.frequencies[1], -static_cast<double>(rope.rotary_dim) / 2));
}

// Adds the keys that only some architectures have.
void AddKeysOf(const DecoderSpec& spec, const std::string& architecture,
               GgufBuilder* builder) {
  const auto key = [&](const char* name) {
    return absl::StrCat(architecture, ".", name);
  };
  const auto put = [&](const char* name, int64_t value) {
    builder->U32(key(name), static_cast<uint32_t>(value));
  };
  if (spec.experts.count > 0) {
    put("expert_count", spec.experts.count);
    put("expert_used_count", spec.experts.top_k);
  }
  if (architecture == "qwen3moe") {
    put("expert_feed_forward_length", spec.experts.intermediate_size);
    builder->Bool(key("expert_weights_norm"), spec.experts.normalize);
  }
  if (architecture == "gptneox") {
    builder->Bool(key("use_parallel_residual"), spec.parallel_residual);
  }
  if (architecture == "phi3") {
    put("rope.scaling.original_context_length",
        spec.rope.short_positions > 0 ? spec.rope.short_positions : 4096);
  }
  if (!architecture.starts_with("gemma")) return;
  std::string layers;
  for (const LayerSpec& layer : spec.layers) {
    layers.push_back(layer.sliding_window > 0 ? 1 : 0);
  }
  builder->Array(key("attention.sliding_window_pattern"), GgufType::kBool,
                 layers.size(), layers);
  if (architecture == "gemma2") {
    builder->F32(key("attn_logit_softcapping"),
                 static_cast<float>(spec.score_cap));
    builder->F32(key("final_logit_softcapping"),
                 static_cast<float>(spec.logit_cap));
    return;
  }
  builder->F32(key("rope.freq_base_swa"),
               static_cast<float>(ThetaOf(*spec.window_rope)));
  if (spec.rope.frequencies[0] != 1) {
    builder->String(key("rope.scaling.type"), "linear");
    builder->F32(key("rope.scaling.factor"),
                 static_cast<float>(1 / spec.rope.frequencies[0]));
  }
}

GgufBuilder KeysOf(const DecoderSpec& spec, const Model& model) {
  GgufBuilder builder;
  builder.String("general.architecture", model.architecture);
  const auto key = [&](const char* name) {
    return absl::StrCat(model.architecture, ".", name);
  };
  const auto put = [&](const char* name, int64_t value) {
    builder.U32(key(name), static_cast<uint32_t>(value));
  };
  put("embedding_length", spec.hidden_size);
  put("block_count", spec.num_layers());
  put("feed_forward_length", spec.intermediate_size);
  put("context_length", spec.max_position_embeddings);
  put("attention.head_count", spec.num_heads);
  put("attention.head_count_kv", spec.num_kv_heads);
  put("attention.key_length", spec.head_dim);
  put("attention.value_length", spec.head_dim);
  put("rope.dimension_count", spec.rope.rotary_dim);
  put("vocab_size", spec.vocab_size);
  int64_t window = 0;
  for (const LayerSpec& layer : spec.layers) {
    window = std::max(window, layer.sliding_window);
  }
  if (window > 0) put("attention.sliding_window", window);
  builder.F32(
      key("rope.freq_base"),
      static_cast<float>(model.theta > 0 ? model.theta : ThetaOf(spec.rope)));
  builder.F32(
      key(model.architecture == "gptneox" ? "attention.layer_norm_epsilon"
                                          : "attention.layer_norm_rms_epsilon"),
      static_cast<float>(spec.norm_eps));
  AddKeysOf(spec, model.architecture, &builder);
  return builder;
}

// Adds the factors of LongRoPE: the unscaled frequencies divided by the
// model's frequencies.
void AddLongRope(const DecoderSpec& spec, double theta, GgufBuilder* builder) {
  if (spec.rope.long_frequencies.empty()) return;
  for (const auto& [name, frequencies] :
       {std::pair("rope_factors_long.weight", &spec.rope.long_frequencies),
        std::pair("rope_factors_short.weight", &spec.rope.frequencies)}) {
    std::string bytes;
    for (size_t pair = 0; pair < frequencies->size(); ++pair) {
      const double plain =
          std::pow(theta, -2 * static_cast<double>(pair) /
                              static_cast<double>(spec.rope.rotary_dim));
      AppendNumber(static_cast<float>(plain / (*frequencies)[pair]), &bytes);
    }
    builder->Tensor(name, {frequencies->size()}, 0, bytes);
  }
}

// Puts the two rows of each RoPE pair next to each other, as in GGUF files of
// the architecture llama.
std::string Interleave(const std::string& rows, size_t row_bytes,
                       size_t head_rows) {
  std::string out;
  for (size_t head = 0; head < rows.size(); head += head_rows * row_bytes) {
    for (size_t pair = 0; pair < head_rows / 2; ++pair) {
      for (const size_t row : {pair, pair + head_rows / 2}) {
        out += rows.substr(head + row * row_bytes, row_bytes);
      }
    }
  }
  return out;
}

std::string BytesOf(const Checkpoint& checkpoint, const std::string& name) {
  const TensorStore::Entry entry = checkpoint.Tensor(name).value();
  std::string bytes(entry.info->size_bytes, '\0');
  KVASIR_EXPECT_OK(entry.file->Read(
      *entry.info, 0, std::as_writable_bytes(std::span<char>(bytes))));
  return bytes;
}

// Returns the numbers of a tensor in BF16 or F32.
std::vector<float> FloatsOf(const Checkpoint& checkpoint,
                            const std::string& name) {
  const std::string bytes = BytesOf(checkpoint, name);
  const size_t width =
      checkpoint.Tensor(name)->info->type == TensorType::kF32 ? 4 : 2;
  std::vector<float> numbers(bytes.size() / width);
  for (size_t i = 0; i < numbers.size(); ++i) {
    uint32_t bits = 0;
    std::memcpy(reinterpret_cast<char*>(&bits) + 4 - width, &bytes[i * width],
                width);
    std::memcpy(&numbers[i], &bits, sizeof(bits));
  }
  return numbers;
}

struct FileTensor {
  std::string name;
  std::vector<uint64_t> dims;
  uint32_t type = 0;
  std::string data;
};

// Returns the model's tensors in the form that files of the architecture have.
std::vector<FileTensor> TensorsOf(const Checkpoint& checkpoint,
                                  const std::string& architecture) {
  std::vector<FileTensor> tensors;
  const auto find = [&](const std::string& name) {
    return std::find_if(tensors.begin(), tensors.end(),
                        [&](const auto& one) { return one.name == name; });
  };
  for (const RequiredTensor& want : RequiredTensors(checkpoint.spec())) {
    const TensorInfo& info = *checkpoint.Tensor(want.name)->info;
    FileTensor tensor = {GgufNameOf(checkpoint.spec(), want.name),
                         {info.shape.rbegin(), info.shape.rend()},
                         GgmlTypeOf(info.type),
                         BytesOf(checkpoint, want.name)};
    if ((architecture == "llama" || architecture == "smollm3") &&
        (tensor.name.find("attn_q") != tensor.name.npos ||
         tensor.name.find("attn_k") != tensor.name.npos)) {
      tensor.data = Interleave(tensor.data, info.row_bytes(),
                               static_cast<size_t>(checkpoint.spec().head_dim));
    }
    if (architecture.starts_with("gemma") &&
        tensor.name.ends_with("norm.weight")) {
      tensor.type = 0;
      tensor.data.clear();
      for (const float weight : FloatsOf(checkpoint, want.name)) {
        AppendNumber(weight + 1, &tensor.data);
      }
    }
    const bool is_expert = tensor.name.ends_with("_exps.weight");
    if (is_expert) tensor.dims.push_back(1);
    const auto same = find(tensor.name);
    if (same == tensors.end()) {
      tensors.push_back(std::move(tensor));
      continue;
    }
    // A stored tensor has the rows of all parts of a fused tensor, or of all
    // experts, one after the other.
    same->dims.back() += is_expert ? 1 : tensor.dims.back();
    same->data += tensor.data;
  }
  return tensors;
}

std::string GgufOf(const Checkpoint& checkpoint, const Model& model) {
  GgufBuilder builder = KeysOf(checkpoint.spec(), model);
  AddLongRope(checkpoint.spec(), model.theta, &builder);
  for (const FileTensor& tensor : TensorsOf(checkpoint, model.architecture)) {
    builder.Tensor(tensor.name, tensor.dims, tensor.type, tensor.data);
  }
  return builder.Build();
}

// Returns the folder of a golden model. Its config gets the values that GGUF
// files of the architecture imply, because they have no keys for them: the
// scale of Gemma's scores, and whether Qwen3-MoE has windows.
std::string FolderOf(const Model& model, const base::TempFolder& files) {
  std::string golden = GoldenModel(model.name);
  auto config = nlohmann::json::parse(LoadConfigText(golden).value());
  if (model.architecture.starts_with("gemma")) {
    config["query_pre_attn_scalar"] = config["head_dim"];
  } else if (model.architecture == "qwen3moe") {
    config["use_sliding_window"] = false;
  } else {
    return golden;
  }
  const std::string folder = files.File("golden");
  std::filesystem::create_directory(folder);
  files.Write("golden/config.json", config.dump());
  std::filesystem::create_symlink(
      std::filesystem::absolute(golden + "/model.safetensors"),
      folder + "/model.safetensors");
  return folder;
}

absl::StatusOr<std::string> WeightsId(const Checkpoint& checkpoint,
                                      size_t buffer_bytes) {
  WeightsIdBuilder builder;
  std::vector<std::byte> buffer(buffer_bytes);
  for (const RequiredTensor& want : RequiredTensors(checkpoint.spec())) {
    auto entry = checkpoint.Tensor(want.name);
    if (!entry.ok()) return entry.status();
    TensorStream stream(*entry, buffer);
    while (true) {
      auto block = stream.Next();
      if (!block.ok()) return block.status();
      if (block->num_rows == 0) break;
    }
    builder.Add(want.name, stream.info(), stream.tiles());
  }
  return builder.Finish(checkpoint.spec());
}

class GgufCheckpointTest : public ::testing::TestWithParam<Model> {};

TEST_P(GgufCheckpointTest,
       AGgufFileAndAFolderWithTheSameWeightsHaveTheSameWeightsId) {
  const base::TempFolder files;
  KVASIR_ASSERT_OK_AND_ASSIGN(const Checkpoint folder,
                              Checkpoint::Open(FolderOf(GetParam(), files)));
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const Checkpoint checkpoint,
      Checkpoint::Open(files.Write("small.gguf", GgufOf(folder, GetParam()))));
  EXPECT_EQ(checkpoint.name(), "small");
  std::filesystem::create_symlink("small.gguf", files.File("link.gguf"));
  EXPECT_EQ(Checkpoint::Open(files.File("link.gguf"))->name(), "link");
  EXPECT_TRUE(checkpoint.is_gguf());
  EXPECT_EQ(OutputsText(checkpoint.spec()), OutputsText(folder.spec()));
  // The norms of Gemma have another type, but the same numbers.
  if (GetParam().architecture.starts_with("gemma")) {
    for (const RequiredTensor& want : RequiredTensors(folder.spec())) {
      EXPECT_EQ(FloatsOf(checkpoint, want.name), FloatsOf(folder, want.name))
          << want.name;
    }
    return;
  }
  for (const size_t buffer : {512, 1000, 1 << 20}) {
    EXPECT_EQ(WeightsId(checkpoint, buffer).value(),
              WeightsId(folder, 1 << 20).value());
  }
}

TEST_P(GgufCheckpointTest,
       AModelHasTheSameWeightsIdInOneFileAndInSeveralFiles) {
  const base::TempFolder files;
  KVASIR_ASSERT_OK_AND_ASSIGN(const Checkpoint folder,
                              Checkpoint::Open(FolderOf(GetParam(), files)));
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const Checkpoint whole,
      Checkpoint::Open(files.Write("small.gguf", GgufOf(folder, GetParam()))));
  GgufBuilder parts[3] = {KeysOf(folder.spec(), GetParam()), {}, {}};
  for (uint32_t i = 0; i < 3; ++i) {
    parts[i].U32("split.no", i).U32("split.count", 3);
  }
  size_t next = 0;
  for (const FileTensor& tensor : TensorsOf(folder, GetParam().architecture)) {
    parts[next++ % 3].Tensor(tensor.name, tensor.dims, tensor.type,
                             tensor.data);
  }
  AddLongRope(folder.spec(), GetParam().theta, &parts[2]);
  for (int i = 3; i > 0; --i) {
    files.Write(absl::StrFormat("m-%05d-of-00003.gguf", i),
                parts[i - 1].Build());
  }
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const Checkpoint checkpoint,
      Checkpoint::Open(files.File("m-00001-of-00003.gguf")));
  EXPECT_EQ(checkpoint.name(), "m");
  EXPECT_EQ(WeightsId(checkpoint, 1000).value(),
            WeightsId(whole, 1000).value());
}

TEST_P(GgufCheckpointTest,
       AFolderWrittenFromAGgufFileHasTheSameWeightsIdAsTheFile) {
  const base::TempFolder files;
  KVASIR_ASSERT_OK_AND_ASSIGN(const Checkpoint golden,
                              Checkpoint::Open(FolderOf(GetParam(), files)));
  const std::string path =
      files.Write("small.gguf", GgufOf(golden, GetParam()));
  const std::string folder = files.File("folder");
  KVASIR_ASSERT_OK(WriteFolderOfGguf(path, folder));
  KVASIR_ASSERT_OK_AND_ASSIGN(const Checkpoint written,
                              Checkpoint::Open(folder));
  EXPECT_FALSE(written.is_gguf());
  EXPECT_EQ(WeightsId(written, 1 << 20).value(),
            WeightsId(golden, 1 << 20).value());
  EXPECT_THAT(WriteFolderOfGguf(path, folder),
              StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr(folder)));
  EXPECT_FALSE(FileExists(folder + ".unfinished"));
  KVASIR_EXPECT_OK(WriteFolderOfGguf(path, files.File("other") + "/"));
  KVASIR_EXPECT_OK(Checkpoint::Open(files.File("other")));
}

INSTANTIATE_TEST_SUITE_P(
    All, GgufCheckpointTest,
    ::testing::Values(
        Model{"llama-mha", "llama"}, Model{"llama-gqa-tied", "llama"},
        Model{"llama-mqa-head-dim", "llama"}, Model{"llama-f16", "llama"},
        Model{"llama-bias", "llama"}, Model{"mistral-window", "llama"},
        Model{"qwen2-tied", "qwen2"}, Model{"qwen2-untied", "qwen2"},
        Model{"qwen3-tied", "qwen3"}, Model{"smollm3-tied", "smollm3"},
        Model{"mixtral-window", "llama"},
        Model{"mixtral-one-of-three", "llama"},
        Model{"qwen3moe-mixed", "qwen3moe"},
        Model{"qwen3moe-not-normalized", "qwen3moe"},
        Model{"gemma3-tied", "gemma3"},
        Model{"gemma3-scaled-v5-config", "gemma3", 50000},
        Model{"phi3-longrope-long", "phi3", 10000},
        Model{"phi3-longrope-short", "phi3", 10000},
        Model{"phi3-part-window", "phi3"}, Model{"olmo2", "olmo2"},
        Model{"olmo2-bias-tied", "olmo2"}, Model{"gemma2-tied", "gemma2"},
        Model{"gemma2-full-bias", "gemma2"},
        Model{"neox-parallel-quarter", "gptneox", 10000},
        Model{"neox-whole-heads", "gptneox"}),
    [](const auto& param) {
      std::string name = param.param.name;
      for (char& c : name) c = c == '-' ? '_' : c;
      return name;
    });

TEST(GgufExpertsTest, AFileMayHaveATensorForEachExpert) {
  const base::TempFolder files;
  const Model model = {"mixtral-window", "llama"};
  KVASIR_ASSERT_OK_AND_ASSIGN(const Checkpoint folder,
                              Checkpoint::Open(FolderOf(model, files)));
  const int64_t count = folder.spec().experts.count;
  for (const int64_t stored : {count, count - 1}) {
    GgufBuilder builder = KeysOf(folder.spec(), model);
    for (FileTensor& tensor : TensorsOf(folder, "llama")) {
      const size_t end = tensor.name.find("_exps.weight");
      if (end == tensor.name.npos) {
        builder.Tensor(tensor.name, tensor.dims, tensor.type, tensor.data);
        continue;
      }
      tensor.dims.pop_back();
      const size_t bytes = tensor.data.size() / static_cast<size_t>(count);
      for (int64_t e = 0; e < stored; ++e) {
        builder.Tensor(
            absl::StrCat(tensor.name.substr(0, end), ".", e, ".weight"),
            tensor.dims, tensor.type,
            tensor.data.substr(static_cast<size_t>(e) * bytes, bytes));
      }
    }
    const auto checkpoint =
        Checkpoint::Open(files.Write("x.gguf", builder.Build()));
    if (stored == count) {
      KVASIR_ASSERT_OK(checkpoint);
      EXPECT_EQ(WeightsId(*checkpoint, 1000).value(),
                WeightsId(folder, 1000).value());
    } else {
      EXPECT_THAT(checkpoint.status(),
                  StatusIs(absl::StatusCode::kNotFound, HasSubstr("_exps")));
    }
  }
}

class BadGgufCheckpointTest : public ::testing::Test {
 protected:
  // Returns the status of opening a file in which one tensor was added or
  // replaced. Without `dims`, the tensor is removed.
  absl::Status StatusWith(const std::string& name,
                          const std::vector<uint64_t>& dims,
                          const Model& model = {"llama-mha", "llama"}) {
    const Checkpoint golden =
        Checkpoint::Open(FolderOf(model, base::TempFolder())).value();
    GgufBuilder builder = KeysOf(golden.spec(), model);
    bool replaced = false;
    for (const FileTensor& tensor : TensorsOf(golden, model.architecture)) {
      replaced = replaced || tensor.name == name;
      if (tensor.name == name && dims.empty()) continue;
      Add(tensor.name, tensor.name == name ? dims : tensor.dims, &builder);
    }
    if (!replaced) Add(name, dims, &builder);
    return Checkpoint::Open(folder_.Write("x.gguf", builder.Build())).status();
  }

  static void Add(const std::string& name, const std::vector<uint64_t>& dims,
                  GgufBuilder* builder) {
    size_t bytes = 4;
    for (const uint64_t dim : dims) bytes *= dim;
    builder->Tensor(name, dims, 0, std::string(bytes, '\0'));
  }

  const base::TempFolder folder_;
};

TEST_F(BadGgufCheckpointTest, TheErrorForAnUnknownTensorNamesIt) {
  EXPECT_THAT(StatusWith("blk.0.attn_sinks.weight", {8}),
              StatusIs(absl::StatusCode::kUnimplemented,
                       AllOf(HasSubstr("x.gguf: blk.0.attn_sinks.weight"),
                             HasSubstr("llama"))));
}

TEST_F(BadGgufCheckpointTest, TheErrorForATensorOfAnotherFamilyNamesIt) {
  EXPECT_THAT(StatusWith("blk.0.attn_q_norm.weight", {8}),
              StatusIs(absl::StatusCode::kUnimplemented,
                       AllOf(HasSubstr("x.gguf: tensor"), HasSubstr("q_norm"),
                             HasSubstr("LlamaForCausalLM"))));
}

TEST_F(BadGgufCheckpointTest, TheErrorForAMissingTensorUsesTheNameInTheFile) {
  EXPECT_THAT(StatusWith("blk.1.ffn_up.weight", {}),
              StatusIs(absl::StatusCode::kNotFound,
                       HasSubstr("tensor blk.1.ffn_up.weight is missing")));
}

TEST_F(BadGgufCheckpointTest,
       TheErrorForAWrongShapeStatesTheExpectedAndTheActualShape) {
  EXPECT_THAT(StatusWith("blk.0.ffn_norm.weight", {3}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("blk.0.ffn_norm.weight"),
                             HasSubstr("have [3]"))));
  EXPECT_THAT(
      StatusWith("blk.0.attn_q.weight", {32, 3}),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr("blk.0.attn_q.weight"), HasSubstr("[3, 32]"))));
}

TEST_F(BadGgufCheckpointTest,
       AJsonFileOfAModelFolderIsRefusedBecauseItIsNotAGgufFile) {
  const std::string path = folder_.Write("tokenizer.json", "{\"model\": {}}");
  EXPECT_THAT(
      Checkpoint::Open(path),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr("tokenizer.json is neither a folder nor a GGUF"),
                     HasSubstr("begins with \"{"))));
}

TEST_F(BadGgufCheckpointTest, ABiasThatTheModelDoesNotAddIsRefused) {
  for (const char* name : {"output_norm.bias", "blk.0.attn_norm.bias",
                           "blk.0.ffn_down.bias", "token_embd.bias"}) {
    EXPECT_THAT(StatusWith(name, {32}),
                StatusIs(absl::StatusCode::kUnimplemented, HasSubstr(name)));
  }
}

TEST_F(BadGgufCheckpointTest, ABiasThatOnlyOneLayerHasIsRefused) {
  EXPECT_THAT(StatusWith("blk.1.attn_q.bias", {32}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("blk.1.attn_q.bias")));
}

TEST_F(BadGgufCheckpointTest, ExpertsAndFusedTensorsOfOtherShapesAreRefused) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  // This model has M = 32, F = 20 and 5 experts.
  const Model mixtral = {"mixtral-window", "llama"};
  const std::string experts = "blk.1.ffn_down_exps.weight";
  EXPECT_THAT(StatusWith(experts, {20, 32, 4}, mixtral),
              StatusIs(kInvalid, AllOf(HasSubstr(experts),
                                       HasSubstr("matrices of 5 experts"),
                                       HasSubstr("[4, 32, 20]"))));
  EXPECT_THAT(StatusWith(experts, {20, 160}, mixtral),
              StatusIs(kInvalid, HasSubstr("matrices of 5 experts")));
  EXPECT_THAT(StatusWith(experts, {16, 32, 5}, mixtral),
              StatusIs(kInvalid, AllOf(HasSubstr(experts),
                                       HasSubstr("want shape [32, 20]"))));
  EXPECT_THAT(StatusWith(experts, {}, mixtral),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr(experts)));
  // This model has M = 32, and 4 query heads and 2 KV heads of 8 dimensions.
  const Model phi3 = {"phi3-part-window", "phi3"};
  for (const auto& [name, rows] : {std::pair("blk.1.attn_qkv.weight", 64),
                                   std::pair("blk.0.ffn_up.weight", 72)}) {
    EXPECT_THAT(StatusWith(name, {32, 63}, phi3),
                StatusIs(kInvalid,
                         AllOf(HasSubstr(name),
                               HasSubstr(absl::StrCat("want ", rows, " rows")),
                               HasSubstr("[63, 32]"))));
    EXPECT_THAT(StatusWith(name, {}, phi3),
                StatusIs(absl::StatusCode::kNotFound, HasSubstr(name)));
  }
  // Llama's tensors are not fused.
  EXPECT_THAT(StatusWith("blk.0.attn_qkv.weight", {32, 96}),
              StatusIs(absl::StatusCode::kUnimplemented,
                       HasSubstr("blk.0.attn_qkv.weight")));
}

TEST_F(BadGgufCheckpointTest, ANormOfGemmaMustHaveTheTypeF32) {
  const base::TempFolder files;
  const Model model = {"gemma3-tied", "gemma3"};
  const Checkpoint golden = Checkpoint::Open(FolderOf(model, files)).value();
  GgufBuilder builder = KeysOf(golden.spec(), model);
  for (FileTensor& tensor : TensorsOf(golden, model.architecture)) {
    if (tensor.name == "blk.1.attn_k_norm.weight") {
      tensor.type = 1;
      tensor.data.resize(tensor.data.size() / 2);
    }
    builder.Tensor(tensor.name, tensor.dims, tensor.type, tensor.data);
  }
  EXPECT_THAT(Checkpoint::Open(files.Write("x.gguf", builder.Build())).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("blk.1.attn_k_norm.weight"),
                             HasSubstr("F32"), HasSubstr("F16"))));
}

}  // namespace
}  // namespace kvasir::model
