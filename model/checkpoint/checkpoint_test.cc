#include "model/checkpoint/checkpoint.h"

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/status_matchers.h"
#include "base/temp_folder.h"

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

// Test fixture: a copy of a golden model, whose files a test may damage.
class CheckpointTest : public ::testing::Test {
 protected:
  CheckpointTest() {
    std::filesystem::copy(GoldenModel("llama-mha"), folder_.path());
  }

  // Replaces text in the header by text of the same length.
  void ReplaceInHeader(const std::string& from, const std::string& to) {
    ASSERT_EQ(from.size(), to.size());
    const std::string path = folder_.File("model.safetensors");
    std::ifstream in(path, std::ios::binary);
    std::string bytes((std::istreambuf_iterator<char>(in)),
                      std::istreambuf_iterator<char>());
    in.close();
    ASSERT_NE(bytes.find(from), bytes.npos) << from;
    absl::StrReplaceAll({{from, to}}, &bytes);
    std::ofstream(path, std::ios::binary) << bytes;
  }

  const base::TempFolder folder_;
};

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

TEST_F(CheckpointTest,
       OpensSingleFileAndShardedModelsWithTiedOrSeparateEmbeddings) {
  for (const char* name :
       {"llama-mha", "llama-gqa-tied", "llama3-scaled-sharded", "llama-f16",
        "qwen2-tied", "llama-bias"}) {
    KVASIR_EXPECT_OK(Checkpoint::Open(GoldenModel(name)));
  }
}

TEST_F(CheckpointTest, AMissingModelFolderIsNamedInTheError) {
  EXPECT_THAT(Checkpoint::Open(folder_.File("no")),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr(folder_.path())));
}

TEST_F(CheckpointTest, AMissingTensorIsNamedInTheError) {
  ReplaceInHeader("model.layers.1.mlp.up_proj", "model.layers.1.mlp.UP_proj");
  EXPECT_THAT(Checkpoint::Open(folder_.path()),
              StatusIs(absl::StatusCode::kNotFound,
                       HasSubstr("tensor model.layers.1.mlp.up_proj.weight is "
                                 "missing")));
}

TEST_F(CheckpointTest,
       UnknownTensorsAreIgnoredUnlessTheyBelongToAnUnsupportedArchitecture) {
  std::ifstream in(folder_.File("model.safetensors"), std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(in)),
                    std::istreambuf_iterator<char>());
  in.close();
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof(length));
  for (const bool unsupported : {false, true}) {
    const std::string name =
        unsupported ? "model.layers.0.self_attn.q_norm.weight"
                    : "model.layers.0.self_attn.rotary_emb.inv_freq";
    const std::string extra =
        absl::StrCat("{\"", name, "\":{\"dtype\":\"I64\",\"shape\":[0],",
                     "\"data_offsets\":[0,0]},");
    const uint64_t new_length = length + extra.size() - 1;
    std::string changed(8, '\0');
    std::memcpy(changed.data(), &new_length, sizeof(new_length));
    absl::StrAppend(&changed, extra, bytes.substr(9));
    folder_.Write("model.safetensors", changed);
    if (unsupported) {
      EXPECT_THAT(
          Checkpoint::Open(folder_.path()),
          StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("q_norm")));
    } else {
      KVASIR_EXPECT_OK(Checkpoint::Open(folder_.path()));
    }
  }
}

TEST_F(CheckpointTest,
       TheErrorForAWrongTensorShapeStatesTheExpectedAndTheActualShape) {
  const std::string path = folder_.File("config.json");
  std::ifstream in(path);
  std::string config((std::istreambuf_iterator<char>(in)),
                     std::istreambuf_iterator<char>());
  in.close();
  absl::StrReplaceAll({{"\"vocab_size\": 131", "\"vocab_size\": 132"}},
                      &config);
  std::ofstream(path) << config;
  EXPECT_THAT(
      Checkpoint::Open(folder_.path()),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr("model.safetensors"),
                     HasSubstr("model.embed_tokens.weight"),
                     HasSubstr("want shape [132,"), HasSubstr("have [131,"))));
}

TEST_F(CheckpointTest, AWeightWithAnIntegerTypeIsRefused) {
  ReplaceInHeader("\"dtype\":\"F32\"", "\"dtype\":\"I32\"");
  EXPECT_THAT(
      Checkpoint::Open(folder_.path()),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("has the type I32, but must have F32, F16 or BF16")));
}

TEST_F(CheckpointTest, TheTextOfThePlanFileInTheModelFolderIsReturned) {
  folder_.Write("kv_plan.json", "{\"schema_version\":1}");
  KVASIR_ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint,
                              Checkpoint::Open(folder_.path()));
  EXPECT_EQ(checkpoint.kv_plan_json(), "{\"schema_version\":1}");
}

TEST_F(CheckpointTest, WeightsIdDependsOnEveryBitButNotOnTheBlockSize) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint,
                              Checkpoint::Open(folder_.path()));
  KVASIR_ASSERT_OK_AND_ASSIGN(const std::string id,
                              WeightsId(checkpoint, 1 << 20));
  KVASIR_ASSERT_OK_AND_ASSIGN(const std::string same,
                              WeightsId(checkpoint, 700));
  EXPECT_EQ(id, same);
  EXPECT_EQ(id.size(), 32u);

  std::fstream file(folder_.File("model.safetensors"),
                    std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(-1, std::ios::end);
  const char last = static_cast<char>(file.get());
  file.seekp(-1, std::ios::end);
  file.put(static_cast<char>(last ^ 1));
  file.close();
  KVASIR_ASSERT_OK_AND_ASSIGN(const std::string other,
                              WeightsId(checkpoint, 1 << 20));
  EXPECT_NE(id, other);
}

TEST_F(CheckpointTest, ReadingATensorFailsIfTheBufferIsSmallerThanOneRow) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint,
                              Checkpoint::Open(folder_.path()));
  EXPECT_THAT(WeightsId(checkpoint, 4),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("the read buffer has only 4")));
}

TEST_F(CheckpointTest, ATensorStreamReturnsWholeRowsInOrder) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const Checkpoint checkpoint,
                              Checkpoint::Open(folder_.path()));
  KVASIR_ASSERT_OK_AND_ASSIGN(const TensorStore::Entry entry,
                              checkpoint.Tensor(kEmbeddingName));
  std::vector<std::byte> whole(entry.info->size_bytes);
  KVASIR_ASSERT_OK(entry.file->Read(*entry.info, 0, whole));
  std::vector<std::byte> buffer(entry.info->row_bytes() * 10 + 3);
  TensorStream stream(entry, buffer);
  std::vector<std::byte> gathered;
  int64_t rows = 0;
  while (true) {
    KVASIR_ASSERT_OK_AND_ASSIGN(const TensorStream::Block block, stream.Next());
    if (block.num_rows == 0) break;
    EXPECT_EQ(block.first_row, rows);
    EXPECT_LE(block.num_rows, 10);
    rows += block.num_rows;
    gathered.insert(gathered.end(), block.bytes.begin(), block.bytes.end());
  }
  EXPECT_EQ(rows, entry.info->num_rows());
  EXPECT_EQ(gathered, whole);
}

}  // namespace
}  // namespace kvasir::model
