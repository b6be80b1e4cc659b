#include "model/checkpoint/family_tensors.h"

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/status_matchers.h"
#include "base/temp_folder.h"
#include "model/checkpoint/checkpoint.h"

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

std::vector<std::byte> Bytes(const TensorStore::Entry& entry) {
  std::vector<std::byte> bytes(entry.info->size_bytes);
  KVASIR_EXPECT_OK(entry.file->Read(*entry.info, 0, bytes));
  return bytes;
}

DecoderSpec Spec(const char* model_type) {
  DecoderSpec spec;
  spec.model_type = model_type;
  spec.hidden_size = 12;
  spec.num_heads = 3;
  spec.num_kv_heads = 3;
  spec.head_dim = 4;
  spec.max_position_embeddings = 10;
  return spec;
}

TEST(FamilyTensorsTest, EveryCanonicalNameMapsToTheFamilysStoredName) {
  const auto stored = [](const char* family, const char* name) {
    return StoredTensorOf(Spec(family), name).name;
  };
  EXPECT_EQ(stored("gpt_neox", "model.layers.11.self_attn.o_proj.bias"),
            "gpt_neox.layers.11.attention.dense.bias");
  EXPECT_EQ(stored("gpt_neox", "lm_head.weight"), "embed_out.weight");
  EXPECT_EQ(stored("gpt_neox", "model.norm.bias"),
            "gpt_neox.final_layer_norm.bias");
  EXPECT_EQ(stored("opt", "model.layers.0.post_attention_layernorm.weight"),
            "model.decoder.layers.0.final_layer_norm.weight");
  EXPECT_EQ(stored("opt", "lm_head.weight"), "lm_head.weight");
  EXPECT_EQ(stored("llama", "model.norm.weight"), "model.norm.weight");
  EXPECT_EQ(stored("mixtral", "model.layers.3.mlp.gate.weight"),
            "model.layers.3.block_sparse_moe.gate.weight");
  EXPECT_EQ(stored("mixtral", "model.layers.3.mlp.experts.12.down_proj.weight"),
            "model.layers.3.block_sparse_moe.experts.12.w2.weight");
  EXPECT_EQ(stored("mixtral", "model.layers.3.self_attn.q_proj.weight"),
            "model.layers.3.self_attn.q_proj.weight");
  // The tensors of an artifact have canonical names in every family.
  for (const char* name : {"model.layers.0.self_attn.k_proj.down.weight",
                           "model.layers.0.self_attn.k_proj.part1.weight"}) {
    EXPECT_EQ(stored("gpt_neox", name), name);
    EXPECT_EQ(stored("opt", name), name);
  }
}

TEST(FamilyTensorsTest, TheTensorsOfAnExpertKeepItsNumber) {
  const auto ours = [](const char* stored) {
    return OurNamesOf(Spec("mixtral"), stored);
  };
  const std::string layer = "model.layers.7.";
  EXPECT_EQ(ours("model.layers.7.block_sparse_moe.experts.0.w1.weight"),
            std::vector{layer + "mlp.experts.0.gate_proj.weight"});
  EXPECT_EQ(ours("model.layers.7.block_sparse_moe.experts.10.w3.weight"),
            std::vector{layer + "mlp.experts.10.up_proj.weight"});
  for (const char* other :
       {"model.layers.7.block_sparse_moe.experts..w1.weight",
        "model.layers.7.block_sparse_moe.experts.1",
        "model.layers.7.block_sparse_moe.experts.1.w4.weight",
        "model.layers.7.block_sparse_moe.experts.1x.w1.weight"}) {
    EXPECT_EQ(ours(other), std::vector<std::string>{other});
  }
}

TEST(FamilyTensorsTest, RowsOfAFusedQkvTensorAreStoredHeadByHead) {
  const StoredTensor key = StoredTensorOf(
      Spec("gpt_neox"), "model.layers.2.self_attn.k_proj.weight");
  EXPECT_EQ(key.name, "gpt_neox.layers.2.attention.query_key_value.weight");
  EXPECT_EQ(key.rows, (RowBlocks{4, 4, 12}));
  EXPECT_EQ(key.num_rows, 12);
  const StoredTensor positions =
      StoredTensorOf(Spec("opt"), "model.embed_positions.weight");
  EXPECT_EQ(positions.rows.first, 2);
  EXPECT_EQ(positions.num_rows, 10);
}

// In the fused rows [heads, 3, head_dim], element [h, p, d] is row d of head
// h's query (p = 0), key (1) or value (2).
TEST(FamilyTensorsTest, AFusedQkvTensorIsReadAsThreeTensorsInPiecesOfAnySize) {
  auto checkpoint = Checkpoint::Open(GoldenModel("neox-parallel-quarter"));
  KVASIR_ASSERT_OK(checkpoint);
  const DecoderSpec& spec = checkpoint->spec();
  for (const char* leaf : {"weight", "bias"}) {
    const auto fused = Bytes(checkpoint->tensors().stored().at(
        absl::StrCat("gpt_neox.layers.1.attention.query_key_value.", leaf)));
    int64_t part = 0;
    for (const char* name : {"q_proj", "k_proj", "v_proj"}) {
      auto entry = checkpoint->Tensor(
          absl::StrCat("model.layers.1.self_attn.", name, ".", leaf));
      KVASIR_ASSERT_OK(entry);
      EXPECT_EQ(entry->info->num_rows(), spec.hidden_size);
      const std::vector<std::byte> own = Bytes(*entry);
      const size_t row = entry->info->row_bytes();
      ASSERT_EQ(own.size(), row * static_cast<size_t>(spec.hidden_size));
      for (int64_t i = 0; i < spec.hidden_size; ++i) {
        const int64_t stored =
            (i / spec.head_dim * 3 + part) * spec.head_dim + i % spec.head_dim;
        EXPECT_EQ(0, std::memcmp(
                         own.data() + static_cast<size_t>(i) * row,
                         fused.data() + static_cast<size_t>(stored) * row, row))
            << name << " row " << i;
      }
      // These ranges cross the borders between the blocks of rows that belong
      // to the canonical tensor.
      for (size_t begin = 0; begin + 3 < own.size(); begin += 17) {
        std::vector<std::byte> piece(
            std::min(own.size() - begin, size_t{5} * row + 3));
        KVASIR_ASSERT_OK(entry->file->Read(*entry->info, begin, piece));
        EXPECT_EQ(0,
                  std::memcmp(piece.data(), own.data() + begin, piece.size()));
      }
      std::vector<std::byte> buffer(3 * row);
      TensorStream stream(*entry, buffer);
      std::vector<std::byte> streamed;
      while (true) {
        auto block = stream.Next();
        KVASIR_ASSERT_OK(block);
        if (block->num_rows == 0) break;
        streamed.insert(streamed.end(), block->bytes.begin(),
                        block->bytes.end());
      }
      EXPECT_EQ(streamed, own);
      ++part;
    }
  }
}

TEST(FamilyTensorsTest, TheUnusedFirstRowsOfTheOptPositionTableAreSkipped) {
  auto checkpoint = Checkpoint::Open(GoldenModel("opt-tied"));
  KVASIR_ASSERT_OK(checkpoint);
  auto table = checkpoint->Tensor(kPositionsName);
  KVASIR_ASSERT_OK(table);
  const TensorStore::Entry& stored =
      checkpoint->tensors().stored().at("model.decoder.embed_positions.weight");
  EXPECT_EQ(table->info->num_rows() + kUnusedOptPositions,
            stored.info->num_rows());
  const auto whole = Bytes(stored);
  const auto own = Bytes(*table);
  EXPECT_EQ(0,
            std::memcmp(own.data(), whole.data() + 2 * stored.info->row_bytes(),
                        own.size()));
}

TEST(FamilyTensorsTest, TensorNamesOfOlderOptFilesMayLackTheModelPrefix) {
  KVASIR_EXPECT_OK(Checkpoint::Open(GoldenModel("opt-untied-no-bias")));
}

// Opens a copy of a golden model after replacing a text in its header by
// another text of the same length.
absl::Status OpenWith(const std::string& model, const std::string& from,
                      const std::string& to) {
  EXPECT_EQ(from.size(), to.size());
  const base::TempFolder folder;
  std::filesystem::copy(GoldenModel(model), folder.path());
  std::ifstream in(folder.File("model.safetensors"), std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(in)),
                    std::istreambuf_iterator<char>());
  in.close();
  EXPECT_NE(bytes.find(from), bytes.npos) << from;
  absl::StrReplaceAll({{from, to}}, &bytes);
  folder.Write("model.safetensors", bytes);
  return Checkpoint::Open(folder.path()).status();
}

TEST(SpoiledCheckpointTest,
     TheErrorForAMissingTensorUsesTheStoredNameOfTheModelFamily) {
  EXPECT_THAT(
      OpenWith("neox-serial-half",
               "gpt_neox.layers.1.attention.query_key_value"
               ".weight",
               "gpt_neox.layers.1.attention.query_KEY_value.weight"),
      StatusIs(absl::StatusCode::kNotFound,
               HasSubstr("tensor gpt_neox.layers.1.attention.query_key_value."
                         "weight is missing")));
}

TEST(SpoiledCheckpointTest, AFusedTensorWithAWrongNumberOfRowsIsRefused) {
  EXPECT_THAT(
      OpenWith("neox-serial-half", "\"shape\":[72,24]", "\"shape\":[24,72]"),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr("query_key_value.weight"),
                     HasSubstr("must have 72 rows"),
                     HasSubstr("its shape is [24, 72]"))));
}

TEST(SpoiledCheckpointTest, ATensorThatIsStoredUnderTwoNamesIsRefused) {
  EXPECT_THAT(OpenWith("opt-tied", "model.decoder.layers.1.fc1.weight",
                       "model.layers.0.mlp.up_proj.weight"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("model.decoder.layers.0.fc1.weight"),
                             HasSubstr("is stored twice"))));
}

}  // namespace
}  // namespace kvasir::model
