#include "model/checkpoint/gguf_tensors.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <limits>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_matchers.h"
#include "base/temp_folder.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/gguf_folder.h"
#include "model/gguf/gguf_blocks.h"
#include "model/gguf/testing/gguf_builder.h"

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

// The metadata of a model without scaled RoPE.
GgufBuilder KeysOf(const DecoderSpec& spec, const std::string& architecture) {
  GgufBuilder builder;
  builder.String("general.architecture", architecture);
  const auto key = [&](const char* name) {
    return absl::StrCat(architecture, ".", name);
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
  put("rope.dimension_count", spec.head_dim);
  put("vocab_size", spec.vocab_size);
  if (spec.layers[0].sliding_window > 0) {
    put("attention.sliding_window", spec.layers[0].sliding_window);
  }
  // The frequency of pair 1 is theta^(-2/D).
  const double theta = std::pow(spec.rope.frequencies[1],
                                -static_cast<double>(spec.head_dim) / 2);
  builder.F32(key("rope.freq_base"), static_cast<float>(std::round(theta)));
  builder.F32(key("attention.layer_norm_rms_epsilon"),
              static_cast<float>(spec.norm_eps));
  return builder;
}

// Puts the two rows of each RoPE pair next to each other, as GGUF files of the
// architecture llama have them.
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

std::string GgufOf(const Checkpoint& checkpoint,
                   const std::string& architecture) {
  GgufBuilder builder = KeysOf(checkpoint.spec(), architecture);
  for (const RequiredTensor& want : RequiredTensors(checkpoint.spec())) {
    const auto entry = checkpoint.Tensor(want.name);
    EXPECT_TRUE(entry.ok()) << entry.status();
    const TensorInfo& info = *entry->info;
    std::string bytes(info.size_bytes, '\0');
    KVASIR_EXPECT_OK(entry->file->Read(
        info, 0, std::as_writable_bytes(std::span<char>(bytes))));
    const std::string name = GgufNameOf(want.name);
    if ((architecture == "llama" || architecture == "smollm3") &&
        (name.find("attn_q") != name.npos ||
         name.find("attn_k") != name.npos)) {
      bytes = Interleave(bytes, info.row_bytes(),
                         static_cast<size_t>(checkpoint.spec().head_dim));
    }
    std::vector<uint64_t> dims(info.shape.rbegin(), info.shape.rend());
    builder.Tensor(name, dims, GgmlTypeOf(info.type), bytes);
  }
  return builder.Build();
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

struct Model {
  std::string name;
  std::string architecture;
};

class GgufCheckpointTest : public ::testing::TestWithParam<Model> {};

TEST_P(GgufCheckpointTest, HasTheWeightsIdOfTheFolderWithTheSameWeights) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const Checkpoint folder,
                              Checkpoint::Open(GoldenModel(GetParam().name)));
  const base::TempFolder files;
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const Checkpoint checkpoint,
      Checkpoint::Open(
          files.Write("small.gguf", GgufOf(folder, GetParam().architecture))));
  EXPECT_EQ(checkpoint.name(), "small");
  std::filesystem::create_symlink("small.gguf", files.File("link.gguf"));
  EXPECT_EQ(Checkpoint::Open(files.File("link.gguf"))->name(), "link");
  EXPECT_TRUE(checkpoint.is_gguf());
  EXPECT_EQ(OutputsText(checkpoint.spec()), OutputsText(folder.spec()));
  for (const size_t buffer : {512, 1000, 1 << 20}) {
    EXPECT_EQ(WeightsId(checkpoint, buffer).value(),
              WeightsId(folder, 1 << 20).value());
  }
}

TEST_P(GgufCheckpointTest, AFolderWrittenFromAFileHasItsWeights) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const Checkpoint golden,
                              Checkpoint::Open(GoldenModel(GetParam().name)));
  const base::TempFolder files;
  const std::string path =
      files.Write("small.gguf", GgufOf(golden, GetParam().architecture));
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

INSTANTIATE_TEST_SUITE_P(All, GgufCheckpointTest,
                         ::testing::Values(Model{"llama-mha", "llama"},
                                           Model{"llama-gqa-tied", "llama"},
                                           Model{"llama-mqa-head-dim", "llama"},
                                           Model{"llama-f16", "llama"},
                                           Model{"llama-bias", "llama"},
                                           Model{"mistral-window", "llama"},
                                           Model{"qwen2-tied", "qwen2"},
                                           Model{"qwen2-untied", "qwen2"},
                                           Model{"qwen3-tied", "qwen3"},
                                           Model{"smollm3-tied", "smollm3"}),
                         [](const auto& param) {
                           std::string name = param.param.name;
                           for (char& c : name) c = c == '-' ? '_' : c;
                           return name;
                         });

uint16_t Bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// A model with one layer of 2 query heads and one KV head of 256, whose
// matrices have random blocks of a type.
class GgufUnpackTest : public ::testing::TestWithParam<uint32_t> {
 protected:
  static constexpr int64_t kDim = 256;

  void SetUp() override {
    GgufBuilder builder;
    builder.String("general.architecture", "llama")
        .U32("llama.embedding_length", 2 * kDim)
        .U32("llama.block_count", 1)
        .U32("llama.feed_forward_length", kDim)
        .U32("llama.context_length", 64)
        .U32("llama.attention.head_count", 2)
        .U32("llama.attention.head_count_kv", 1)
        .F32("llama.attention.layer_norm_rms_epsilon", 1e-5f);
    const auto matrix = [&](const std::string& name, int64_t columns,
                            int64_t rows) {
      builder.Tensor(
          name, {static_cast<uint64_t>(columns), static_cast<uint64_t>(rows)},
          GetParam(), Blocks(columns * rows));
    };
    matrix("token_embd.weight", 2 * kDim, 9);
    matrix("blk.0.attn_q.weight", 2 * kDim, 2 * kDim);
    matrix("blk.0.attn_k.weight", 2 * kDim, kDim);
    matrix("blk.0.attn_v.weight", 2 * kDim, kDim);
    matrix("blk.0.attn_output.weight", 2 * kDim, 2 * kDim);
    matrix("blk.0.ffn_gate.weight", 2 * kDim, kDim);
    matrix("blk.0.ffn_up.weight", 2 * kDim, kDim);
    matrix("blk.0.ffn_down.weight", kDim, 2 * kDim);
    for (const char* norm :
         {"output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"}) {
      builder.Tensor(absl::StrCat(norm, ".weight"), {2 * kDim}, 0,
                     std::string(8 * kDim, '\1'));
    }
    path_ = folder_.Write("x.gguf", builder.Build());
  }

  std::string Blocks(int64_t numbers) {
    const GgmlType& type = *FindGgmlType(GetParam());
    std::string bytes(
        static_cast<size_t>(numbers / type.block_numbers * type.block_bytes),
        '\0');
    for (char& byte : bytes) {
      state_ = state_ * 6364136223846793005u + 1442695040888963407u;
      // No float16 with this byte is infinite or not a number.
      byte = static_cast<char>(state_ >> 33 & 0x3f);
    }
    return bytes;
  }

  // The numbers of a tensor [rows, columns] as the file says, in our order.
  std::vector<uint16_t> Want(const std::string& name, bool by_pairs) const {
    const RandomAccessFile file = RandomAccessFile::Open(path_).value();
    const GgufHeader header = GgufHeader::Read(file).value();
    const GgufTensor& tensor = *header.FindTensor(name);
    std::vector<uint8_t> bytes(tensor.size_bytes);
    KVASIR_EXPECT_OK(file.Read(
        tensor.begin_bytes, std::as_writable_bytes(std::span<uint8_t>(bytes))));
    std::vector<float> numbers(static_cast<size_t>(tensor.num_elements()));
    const auto block = static_cast<size_t>(tensor.type->block_numbers);
    for (size_t i = 0; i < numbers.size() / block; ++i) {
      tensor.type->unpack(
          bytes.data() + i * static_cast<size_t>(tensor.type->block_bytes),
          &numbers[i * block]);
    }
    const int64_t columns = tensor.shape[1];
    std::vector<uint16_t> want;
    for (int64_t row = 0; row < tensor.shape[0]; ++row) {
      const int64_t inside = row % kDim;
      const int64_t stored = by_pairs ? row - inside + inside % (kDim / 2) * 2 +
                                            inside / (kDim / 2)
                                      : row;
      for (int64_t i = 0; i < columns; ++i) {
        want.push_back(
            Bf16(numbers[static_cast<size_t>(stored * columns + i)]));
      }
    }
    return want;
  }

  const base::TempFolder folder_;
  std::string path_;
  uint64_t state_ = 7;
};

TEST_P(GgufUnpackTest, AnyPartOfATensorHasTheRoundedNumbersOfTheWhole) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint,
                              Checkpoint::Open(path_));
  for (const auto& [name, stored, by_pairs] :
       {std::tuple("model.layers.0.self_attn.q_proj.weight",
                   "blk.0.attn_q.weight", true),
        std::tuple("model.layers.0.self_attn.k_proj.weight",
                   "blk.0.attn_k.weight", true),
        std::tuple("model.layers.0.mlp.down_proj.weight",
                   "blk.0.ffn_down.weight", false),
        std::tuple("model.embed_tokens.weight", "token_embd.weight", false)}) {
    SCOPED_TRACE(name);
    const std::vector<uint16_t> want = Want(stored, by_pairs);
    KVASIR_ASSERT_OK_AND_ASSIGN(const TensorStore::Entry entry,
                                checkpoint.Tensor(name));
    EXPECT_EQ(entry.info->type, TensorType::kBF16);
    const int64_t columns = static_cast<int64_t>(entry.info->row_bytes()) / 2;
    const int64_t rows = entry.info->num_rows();
    for (const auto& [first_row, num_rows, first, count] :
         {std::tuple<int64_t, int64_t, int64_t, int64_t>(0, rows, 0, columns),
          {1, rows - 1, 0, columns},
          {rows / 2, 3, columns / 2, columns / 2},
          {0, rows, 31, 2},
          {2, 2, 5, columns - 9}}) {
      std::vector<std::byte> buffer(static_cast<size_t>(count) * 2 * 5);
      TensorStream stream(entry,
                          {.first_row = first_row,
                           .num_rows = num_rows,
                           .first_byte = first * 2,
                           .row_bytes = count * 2},
                          buffer);
      int64_t row = first_row;
      while (true) {
        KVASIR_ASSERT_OK_AND_ASSIGN(const TensorStream::Block block,
                                    stream.Next());
        if (block.num_rows == 0) break;
        for (int64_t i = 0; i < block.num_rows; ++i, ++row) {
          ASSERT_EQ(std::memcmp(block.bytes.data() + i * count * 2,
                                want.data() + row * columns + first,
                                static_cast<size_t>(count) * 2),
                    0)
              << "row " << row;
        }
      }
      EXPECT_EQ(row, first_row + num_rows);
    }
    std::vector<std::byte> byte(1);
    EXPECT_THAT(entry.file->Read(*entry.info, 1, byte),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("must be multiples of 2 bytes")));
  }
}

INSTANTIATE_TEST_SUITE_P(All, GgufUnpackTest,
                         ::testing::Values(2, 3, 6, 7, 8, 10, 11, 12, 13, 14,
                                           20, 23),
                         [](const auto& param) {
                           return std::string(FindGgmlType(param.param)->name);
                         });

TEST(GgufFolderTest, NumbersThatAreExactInBf16AreWrittenInBf16) {
  const auto floats = [](size_t count, float value) {
    std::string bytes;
    for (size_t i = 0; i < count; ++i) AppendNumber(value, &bytes);
    return bytes;
  };
  GgufBuilder builder;
  builder.String("general.architecture", "llama")
      .U32("llama.embedding_length", 4)
      .U32("llama.block_count", 1)
      .U32("llama.feed_forward_length", 4)
      .U32("llama.context_length", 64)
      .U32("llama.attention.head_count", 1)
      .F32("llama.attention.layer_norm_rms_epsilon", 1e-5f);
  for (const char* name :
       {"token_embd", "blk.0.attn_q", "blk.0.attn_k", "blk.0.attn_v",
        "blk.0.attn_output", "blk.0.ffn_gate", "blk.0.ffn_up",
        "blk.0.ffn_down"}) {
    builder.Tensor(absl::StrCat(name, ".weight"), {4, 4}, 0, floats(16, 0.1f));
  }
  for (const char* norm : {"output_norm", "blk.0.attn_norm"}) {
    builder.Tensor(absl::StrCat(norm, ".weight"), {4}, 0, floats(4, 1.5f));
  }
  builder.Tensor("blk.0.ffn_norm.weight", {4}, 0,
                 floats(3, 1.5f) + floats(1, 1.1f));
  const base::TempFolder files;
  KVASIR_ASSERT_OK(WriteFolderOfGguf(files.Write("x.gguf", builder.Build()),
                                     files.File("folder")));
  KVASIR_ASSERT_OK_AND_ASSIGN(const Checkpoint written,
                              Checkpoint::Open(files.File("folder")));
  const auto type = [&](const char* name) {
    return written.Tensor(name)->info->type;
  };
  EXPECT_EQ(type("model.norm.weight"), TensorType::kBF16);
  EXPECT_EQ(type("model.layers.0.input_layernorm.weight"), TensorType::kBF16);
  EXPECT_EQ(type("model.layers.0.post_attention_layernorm.weight"),
            TensorType::kF32);
  EXPECT_EQ(type("model.embed_tokens.weight"), TensorType::kF32);
  std::vector<uint16_t> norm(4);
  const TensorStore::Entry entry = *written.Tensor("model.norm.weight");
  KVASIR_ASSERT_OK(entry.file->Read(
      *entry.info, 0, std::as_writable_bytes(std::span<uint16_t>(norm))));
  EXPECT_EQ(norm[3], Bf16(1.5f));
}

TEST(GgufFolderTest, AFileThatCannotBeReadLeavesNoFolder) {
  const base::TempFolder files;
  const std::string folder = files.File("folder");
  EXPECT_THAT(WriteFolderOfGguf(files.Write("x.gguf", "GGUF"), folder),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("x.gguf")));
  EXPECT_THAT(WriteFolderOfGguf(files.File("none"), folder),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("none")));
  EXPECT_FALSE(FileExists(folder));
}

class BadGgufCheckpointTest : public ::testing::Test {
 protected:
  // The status of a file with the model's tensors and one more.
  absl::Status StatusWith(const std::string& name,
                          const std::vector<uint64_t>& dims) {
    const Checkpoint golden =
        Checkpoint::Open(GoldenModel("llama-mha")).value();
    GgufBuilder builder = KeysOf(golden.spec(), "llama");
    bool replaced = false;
    for (const RequiredTensor& want : RequiredTensors(golden.spec())) {
      const std::string stored = GgufNameOf(want.name);
      replaced = replaced || stored == name;
      if (stored == name && dims.empty()) continue;
      const std::vector<uint64_t> own(want.shape.rbegin(), want.shape.rend());
      Add(stored, stored == name ? dims : own, &builder);
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

TEST_F(BadGgufCheckpointTest, AnUnknownTensorIsRefusedByName) {
  EXPECT_THAT(StatusWith("blk.0.attn_sinks.weight", {8}),
              StatusIs(absl::StatusCode::kUnimplemented,
                       AllOf(HasSubstr("x.gguf: blk.0.attn_sinks.weight"),
                             HasSubstr("llama"))));
}

TEST_F(BadGgufCheckpointTest, ATensorOfAnotherFamilyIsRefusedByName) {
  EXPECT_THAT(StatusWith("blk.0.attn_q_norm.weight", {8}),
              StatusIs(absl::StatusCode::kUnimplemented,
                       AllOf(HasSubstr("x.gguf: tensor"), HasSubstr("q_norm"),
                             HasSubstr("LlamaForCausalLM"))));
}

TEST_F(BadGgufCheckpointTest, AMissingTensorIsNamedAsInTheFile) {
  EXPECT_THAT(StatusWith("blk.1.ffn_up.weight", {}),
              StatusIs(absl::StatusCode::kNotFound,
                       HasSubstr("tensor blk.1.ffn_up.weight is missing")));
}

TEST_F(BadGgufCheckpointTest, AWrongShapeIsRefusedWithBothShapes) {
  EXPECT_THAT(StatusWith("blk.0.ffn_norm.weight", {3}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("blk.0.ffn_norm.weight"),
                             HasSubstr("have [3]"))));
  EXPECT_THAT(
      StatusWith("blk.0.attn_q.weight", {32, 3}),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr("blk.0.attn_q.weight"), HasSubstr("have 3"))));
}

TEST_F(BadGgufCheckpointTest, AFileOfAModelFolderIsRefusedBecauseItIsNoGguf) {
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

TEST_F(BadGgufCheckpointTest, ABiasThatOtherLayersLackIsRefused) {
  EXPECT_THAT(StatusWith("blk.1.attn_q.bias", {32}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("blk.1.attn_q.bias")));
}

}  // namespace
}  // namespace kvasir::model
