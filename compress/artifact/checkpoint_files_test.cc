#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/status_matchers.h"
#include "compress/artifact/random_checkpoint.h"
#include "compress/artifact/safetensors_writer.h"
#include "compress/testing/folder_fixture.h"
#include "nlohmann/json.hpp"

namespace kvasir::compress {
namespace {

using ::kvasir::base::StatusIs;
using ::nlohmann::json;
using ::testing::HasSubstr;

// Parses a safetensors file without the code under test.
struct ParsedFile {
  json header;
  std::string data;
};

ParsedFile Parse(const std::filesystem::path& path) {
  const std::string file = ReadFile(path);
  EXPECT_GE(file.size(), 8U);
  uint64_t length = 0;
  std::memcpy(&length, file.data(), 8);
  EXPECT_EQ((8 + length) % 8, 0U);
  return {json::parse(file.substr(8, length)), file.substr(8 + length)};
}

class CheckpointFilesTest : public FolderTest {
 protected:
  std::vector<std::string> Files() const {
    std::vector<std::string> names;
    for (const auto& file : std::filesystem::directory_iterator(folder_)) {
      names.push_back(file.path().filename());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  RandomCheckpointOptions SmallModel() const {
    RandomCheckpointOptions options;
    options.shape = {.name = "small",
                     .num_layers = 2,
                     .hidden_size = 24,
                     .intermediate_size = 40,
                     .num_query_heads = 4,
                     .num_kv_heads = 2,
                     .head_dim = 6,
                     .vocab_size = 50,
                     .max_position = 64,
                     .qkv_bias = true};
    options.out = folder_;
    return options;
  }
};

bool GoOn(const RandomCheckpointProgress&) { return true; }

TEST_F(CheckpointFilesTest,
       TheSafetensorsWriterPlacesTensorsBackToBackAfterThePaddedHeader) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      SafetensorsWriter writer,
      SafetensorsWriter::Create(folder_ / "x.safetensors",
                                {{"a", model::TensorType::kF32, {2}},
                                 {"b", model::TensorType::kBF16, {1, 3}}}));
  const std::string bytes = "aaaaAAAAbbBBbb";
  KVASIR_ASSERT_OK(
      writer.Append(std::as_bytes(std::span(bytes.data(), size_t{3}))));
  KVASIR_ASSERT_OK(writer.Append(
      std::as_bytes(std::span(bytes.data() + 3, bytes.size() - 3))));
  EXPECT_EQ(Files(), std::vector<std::string>{"x.safetensors.partial"});
  KVASIR_ASSERT_OK(writer.Finish());
  EXPECT_EQ(Files(), std::vector<std::string>{"x.safetensors"});

  const ParsedFile file = Parse(folder_ / "x.safetensors");
  EXPECT_EQ(file.data, bytes);
  EXPECT_EQ(file.header["a"],
            json::parse(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})"));
  EXPECT_EQ(
      file.header["b"],
      json::parse(R"({"dtype":"BF16","shape":[1,3],"data_offsets":[8,14]})"));
}

TEST_F(CheckpointFilesTest, ASafetensorsFileThatIsNotFinishedIsRemoved) {
  {
    KVASIR_ASSERT_OK_AND_ASSIGN(
        SafetensorsWriter writer,
        SafetensorsWriter::Create(folder_ / "x.safetensors",
                                  {{"a", model::TensorType::kF32, {2}}}));
    EXPECT_THAT(writer.Finish(),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr("tensors of 8 bytes, but only 0 bytes")));
  }
  EXPECT_TRUE(Files().empty());
}

TEST_F(CheckpointFilesTest,
       AWriterWithReservedHeaderSpaceAcceptsTensorsOneAtATime) {
  const std::vector<TensorEntry> entries = {
      {"wide", model::TensorType::kF64, {1}},
      {"half", model::TensorType::kF16, {2}},
      {"text", model::TensorType::kU8, {3}}};
  int64_t room = 0;
  for (const TensorEntry& entry : entries) {
    room += SafetensorsWriter::HeaderBytes(entry);
  }
  KVASIR_ASSERT_OK_AND_ASSIGN(
      SafetensorsWriter writer,
      SafetensorsWriter::CreateOpen(folder_ / "x.safetensors", room));
  const std::string bytes = "wwwwwwwwhhhhttt";
  size_t at = 0;
  for (const TensorEntry& entry : entries) {
    writer.Declare(entry);
    const auto size = static_cast<size_t>(TensorBytes(entry));
    KVASIR_ASSERT_OK(
        writer.Append(std::as_bytes(std::span(bytes.data() + at, size))));
    at += size;
  }
  KVASIR_ASSERT_OK(writer.Finish());
  const ParsedFile file = Parse(folder_ / "x.safetensors");
  EXPECT_EQ(file.data, bytes);
  EXPECT_EQ(file.header["wide"],
            json::parse(R"({"dtype":"F64","shape":[1],"data_offsets":[0,8]})"));
  EXPECT_EQ(
      file.header["half"],
      json::parse(R"({"dtype":"F16","shape":[2],"data_offsets":[8,12]})"));
  EXPECT_EQ(
      file.header["text"],
      json::parse(R"({"dtype":"U8","shape":[3],"data_offsets":[12,15]})"));
}

TEST_F(CheckpointFilesTest,
       MoreTensorsThanTheReservedHeaderSpaceHoldsAreRefused) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      SafetensorsWriter writer,
      SafetensorsWriter::CreateOpen(folder_ / "x.safetensors", 8));
  writer.Declare({"a", model::TensorType::kU8, {1}});
  KVASIR_ASSERT_OK(writer.Append(std::as_bytes(std::span("t", size_t{1}))));
  EXPECT_THAT(writer.Finish(),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       HasSubstr("bytes were reserved for it")));
}

TEST_F(CheckpointFilesTest, AFailedWriteReportsThePathAndTheReason) {
  EXPECT_THAT(SafetensorsWriter::Create(folder_ / "none" / "x.safetensors", {}),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("none/x.safetensors.partial: No such")));
}

TEST_F(CheckpointFilesTest, ConversionToBf16RoundsToNearestEven) {
  EXPECT_EQ(ToBf16Bits(1.0F), 0x3F80);
  EXPECT_EQ(ToBf16Bits(-2.0F), 0xC000);
  EXPECT_EQ(ToBf16Bits(1.00390625F), 0x3F80);  // half way, rounded down to even
  EXPECT_EQ(ToBf16Bits(1.01171875F), 0x3F82);  // half way, rounded up to even
  EXPECT_EQ(ToBf16Bits(1.004F), 0x3F81);
}

TEST_F(CheckpointFilesTest,
       TheInitCommandWritesEveryTensorThatTheModelShapeNeeds) {
  KVASIR_ASSERT_OK(WriteRandomCheckpoint(SmallModel(), GoOn));
  const ParsedFile file = Parse(folder_ / "model.safetensors");
  // Each of 2 layers has 9 weights and 3 biases. The other tensors are the
  // embedding, the final norm and the head.
  EXPECT_EQ(file.header.size(), 1U + 2 * 12 + 3);
  EXPECT_EQ(file.header["model.layers.1.self_attn.k_proj.weight"]["shape"],
            json::parse("[12,24]"));
  EXPECT_EQ(file.header["model.layers.1.self_attn.k_proj.bias"]["shape"],
            json::parse("[12]"));
  EXPECT_EQ(file.header["lm_head.weight"]["shape"], json::parse("[50,24]"));
  // 2 bytes per number. Each layer has 48 + 1728 + 48 (biases) + 2880 = 4704
  // numbers; then come the final norm (24), the embedding and the head (1200
  // each).
  EXPECT_EQ(file.data.size(), 2U * (2 * 4704 + 24 + 2 * 1200));
  const json config = json::parse(ReadFile(folder_ / "config.json"));
  EXPECT_EQ(config["num_key_value_heads"], 2);
  EXPECT_EQ(config["head_dim"], 6);
  EXPECT_EQ(config["torch_dtype"], "bfloat16");
}

TEST_F(CheckpointFilesTest,
       RandomWeightsDependOnTheSeedButNotOnTheNumberOfThreads) {
  auto written = [&](uint64_t seed, int threads) {
    RandomCheckpointOptions options = SmallModel();
    options.seed = seed;
    options.threads = threads;
    options.overwrite = true;
    KVASIR_EXPECT_OK(WriteRandomCheckpoint(options, GoOn));
    return ReadFile(folder_ / "model.safetensors");
  };
  const std::string one = written(5, 1);
  EXPECT_EQ(one, written(5, 1));
  EXPECT_EQ(one, written(5, 3));
  EXPECT_NE(one, written(6, 1));
}

TEST_F(CheckpointFilesTest, ShardsHoldTheSameBytesAsOneFile) {
  RandomCheckpointOptions options = SmallModel();
  KVASIR_ASSERT_OK(WriteRandomCheckpoint(options, GoOn));
  const ParsedFile whole = Parse(folder_ / "model.safetensors");
  options.max_shard_bytes = 4000;
  options.overwrite = true;
  KVASIR_ASSERT_OK(WriteRandomCheckpoint(options, GoOn));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "model.safetensors"));

  const json index =
      json::parse(ReadFile(folder_ / "model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], whole.data.size());
  EXPECT_EQ(index["weight_map"].size(), whole.header.size() - 1);
  auto bytes_of = [](const ParsedFile& file, const std::string& name) {
    const auto& offsets = file.header[name]["data_offsets"];
    const size_t begin = offsets[0];
    const size_t end = offsets[1];
    return file.data.substr(begin, end - begin);
  };
  for (const auto& [name, shard] : index["weight_map"].items()) {
    const ParsedFile part = Parse(folder_ / shard.get<std::string>());
    ASSERT_TRUE(part.header.contains(name)) << name;
    EXPECT_EQ(bytes_of(part, name), bytes_of(whole, name)) << name;
  }
}

TEST_F(CheckpointFilesTest, AStoppedInitCommandLeavesNoCheckpoint) {
  EXPECT_THAT(WriteRandomCheckpoint(
                  SmallModel(),
                  [](const RandomCheckpointProgress& progress) {
                    return progress.written_bytes < progress.total_bytes / 2;
                  }),
              StatusIs(absl::StatusCode::kCancelled, HasSubstr("stopped")));
  for (const std::string& name : Files()) {
    EXPECT_THAT(name, testing::Not(HasSubstr("safetensors")));
  }
}

TEST_F(CheckpointFilesTest,
       TheInitCommandReplacesExistingWeightsOnlyWithOverwrite) {
  std::ofstream(folder_ / "model-00001-of-00002.safetensors") << "mine";
  EXPECT_THAT(WriteRandomCheckpoint(SmallModel(), GoOn),
              StatusIs(absl::StatusCode::kAlreadyExists,
                       HasSubstr("model-00001-of-00002.safetensors")));
  EXPECT_EQ(ReadFile(folder_ / "model-00001-of-00002.safetensors"), "mine");
}

TEST_F(CheckpointFilesTest,
       TheInitCommandRefusesATokenizerFolderWithoutATokenizer) {
  RandomCheckpointOptions options = SmallModel();
  options.tokenizer = folder_ / "none";
  EXPECT_THAT(
      WriteRandomCheckpoint(options, GoOn),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr("no tokenizer.json")));
}

}  // namespace
}  // namespace kvasir::compress
