#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "base/temp_folder.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/gguf_folder.h"
#include "model/gguf/gguf_blocks.h"
#include "model/gguf/gguf_header.h"
#include "model/gguf/testing/gguf_builder.h"

namespace kvasir::model {
namespace {

using base::StatusIs;
using ::testing::HasSubstr;

uint16_t Bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Test fixture: a GGUF file with one layer of 2 query heads and one KV head of
// 256 dimensions. Its matrices have random blocks of the type GetParam().
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
      // Bytes up to 0x3f, so that no float16 in a block is infinite or NaN.
      byte = static_cast<char>(state_ >> 33 & 0x3f);
    }
    return bytes;
  }

  // Returns the numbers of a tensor [rows, columns] of the file, in the order
  // of a Hugging Face folder.
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

TEST_P(GgufUnpackTest,
       EveryRangeOfATensorIsReadAsTheUnpackedNumbersRoundedToBf16) {
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

TEST(GgufFolderTest, TensorsWhoseNumbersAreAllExactInBf16AreWrittenAsBf16) {
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

TEST(GgufFolderTest, NoFolderRemainsIfTheGgufFileCannotBeRead) {
  const base::TempFolder files;
  const std::string folder = files.File("folder");
  EXPECT_THAT(WriteFolderOfGguf(files.Write("x.gguf", "GGUF"), folder),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("x.gguf")));
  EXPECT_THAT(WriteFolderOfGguf(files.File("none"), folder),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("none")));
  EXPECT_FALSE(FileExists(folder));
}

}  // namespace
}  // namespace kvasir::model
