#include "model/gguf/gguf_header.h"

#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "base/temp_folder.h"
#include "model/gguf/testing/gguf_builder.h"

namespace kvasir::model {
namespace {

using base::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint32_t kF32 = 0;

absl::StatusOr<GgufHeader> Parse(const std::string& file) {
  return GgufHeader::Parse(file, file.size(), "x.gguf");
}

std::string Bytes(size_t count) { return std::string(count, '\0'); }

TEST(GgufHeaderTest, ReadsValuesOfEveryType) {
  std::string u64;
  AppendNumber(uint64_t{1} << 40, &u64);
  std::string i8;
  AppendNumber(int8_t{-3}, &i8);
  std::string f64;
  AppendNumber(0.1, &f64);
  for (const uint32_t version : {2, 3}) {
    KVASIR_ASSERT_OK_AND_ASSIGN(const GgufHeader header,
                                Parse(GgufBuilder()
                                          .U32("u32", 7)
                                          .F32("f32", 1e-5f)
                                          .Bool("bool", true)
                                          .String("string", "text")
                                          .Strings("strings", {"a", "", "bc"})
                                          .I32s("i32s", {-1, 5})
                                          .F32s("f32s", {0.5f})
                                          .Raw("u64", GgufType::kU64, u64)
                                          .Raw("i8", GgufType::kI8, i8)
                                          .Raw("f64", GgufType::kF64, f64)
                                          .Build(version)));
    EXPECT_EQ(header.Int("u32").value(), 7);
    EXPECT_EQ(header.Int("u64").value(), int64_t{1} << 40);
    EXPECT_EQ(header.Int("i8").value(), -3);
    EXPECT_EQ(header.Int("absent").value(), std::nullopt);
    EXPECT_EQ(header.Number("f32").value(), 1e-5);  // the shortest decimal
    EXPECT_EQ(header.Number("f64").value(), 0.1);
    EXPECT_EQ(header.Bool("bool").value(), true);
    EXPECT_EQ(header.String("string").value(), "text");
    EXPECT_THAT(header.Strings("strings").value(), ElementsAre("a", "", "bc"));
    EXPECT_THAT(header.Ints("i32s").value(), ElementsAre(-1, 5));
    EXPECT_THAT(header.Floats("f32s").value(), ElementsAre(0.5f));
    EXPECT_THAT(
        header.Int("string"),
        StatusIs(absl::StatusCode::kInvalidArgument,
                 AllOf(HasSubstr("x.gguf: string"),
                       HasSubstr("want an integer"), HasSubstr("string"))));
    EXPECT_FALSE(header.Int("i32s").ok());
    EXPECT_FALSE(header.Number("bool").ok());
    EXPECT_FALSE(header.Bool("u32").ok());
    EXPECT_FALSE(header.String("strings").ok());
    EXPECT_FALSE(header.Strings("string").ok());
    EXPECT_FALSE(header.Ints("f32s").ok());
    EXPECT_FALSE(header.Floats("i32s").ok());
  }
}

TEST(GgufHeaderTest, TensorDataBeginsAtTheNextMultipleOfTheAlignment) {
  const std::string file = GgufBuilder()
                               .Tensor("b", {2, 3}, kF32, Bytes(24))
                               .Tensor("a", {4}, kF32, Bytes(16))
                               .Build();
  KVASIR_ASSERT_OK_AND_ASSIGN(const GgufHeader header, Parse(file));
  ASSERT_EQ(header.tensors().size(), 2u);
  const GgufTensor& b = header.tensors()[0];
  EXPECT_EQ(b.name, "b");
  EXPECT_THAT(b.shape, ElementsAre(3, 2));
  EXPECT_EQ(b.begin_bytes % 32, 0u);
  EXPECT_EQ(b.size_bytes, 24u);
  EXPECT_EQ(b.num_elements(), 6);
  const GgufTensor* const a = header.FindTensor("a");
  ASSERT_NE(a, nullptr);
  EXPECT_EQ(a->begin_bytes, b.begin_bytes + 32);
  EXPECT_EQ(a->begin_bytes + 16, file.size());
  EXPECT_EQ(header.FindTensor("c"), nullptr);
}

TEST(GgufHeaderTest, TheAlignmentThatTheFileStatesIsUsed) {
  GgufBuilder builder;
  builder.U32("general.alignment", 64).TensorAt("a", {1}, kF32, 0);
  std::string file = builder.Build();
  file.resize((file.size() + 63) / 64 * 64);
  file += Bytes(4);
  KVASIR_ASSERT_OK_AND_ASSIGN(const GgufHeader header, Parse(file));
  EXPECT_EQ(header.tensors()[0].begin_bytes, file.size() - 4);
}

TEST(GgufHeaderTest, AHeaderLargerThanTheFirstReadIsReadCompletely) {
  const base::TempFolder folder;
  const std::string path =
      folder.Write("x.gguf", GgufBuilder()
                                 .String("long", std::string(5 << 20, 'x'))
                                 .U32("last", 9)
                                 .Build());
  KVASIR_ASSERT_OK_AND_ASSIGN(const GgufHeader header, GgufHeader::Open(path));
  EXPECT_EQ(header.Int("last").value(), 9);
}

struct BadFile {
  std::string name;
  std::string file;
  absl::StatusCode code;
  std::vector<std::string> parts;
};

std::string WithCounts(uint64_t tensors, uint64_t keys) {
  std::string file = "GGUF";
  AppendNumber(uint32_t{3}, &file);
  AppendNumber(tensors, &file);
  AppendNumber(keys, &file);
  return file;
}

std::vector<BadFile> BadFiles() {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  constexpr auto kDataLoss = absl::StatusCode::kDataLoss;
  constexpr auto kUnserved = absl::StatusCode::kUnimplemented;
  constexpr auto kTooMuch = absl::StatusCode::kResourceExhausted;
  constexpr uint64_t kHuge = ~uint64_t{0};
  std::string string_of_huge_size;
  AppendNumber(kHuge, &string_of_huge_size);
  const std::string good = GgufBuilder().U32("k", 1).Build();
  return {
      {"Empty", "", kDataLoss, {"GGUF", "only 0 bytes"}},
      {"OtherMagic", "{\"a\":1}", kInvalid, {"neither a folder nor a GGUF"}},
      {"Version1",
       GgufBuilder().Build(1),
       kUnserved,
       {"version is 1", "2 or 3"}},
      {"BigEndian", GgufBuilder().Build(0x03000000), kUnserved, {"big-endian"}},
      {"AMillionKeys",
       WithCounts(0, 1'000'000),
       kTooMuch,
       {"1000000 keys", "limit is 65536"}},
      {"HugeNumberOfTensors",
       WithCounts(kHuge, 0),
       kTooMuch,
       {"18446744073709551615 tensors", "limit is 65536"}},
      {"CutInAKey",
       good.substr(0, 30),
       kDataLoss,
       {"key 0", "bytes of the file are left"}},
      {"DuplicateKey",
       GgufBuilder().U32("k", 1).U32("k", 2).Build(),
       kInvalid,
       {"key k occurs twice"}},
      {"EmptyKey", GgufBuilder().U32("", 1).Build(), kInvalid, {"0 bytes"}},
      {"LongKey",
       GgufBuilder().U32(std::string(65536, 'k'), 1).Build(),
       kInvalid,
       {"key 0 has 65536 bytes", "1 to 65535"}},
      {"UnknownType",
       GgufBuilder().Raw("k", static_cast<GgufType>(13), "").Build(),
       kInvalid,
       {"type of k is 13", "12"}},
      {"StringBeyondTheFile",
       GgufBuilder().Raw("k", GgufType::kString, string_of_huge_size).Build(),
       kDataLoss,
       {"k takes 18446744073709551615 bytes"}},
      {"ArrayBeyondTheFile",
       GgufBuilder().Array("k", GgufType::kU64, kHuge / 8 + 1, "").Build(),
       kDataLoss,
       {"k has 2305843009213693952 elements of at least 8 bytes"}},
      {"ArrayOfArrays",
       GgufBuilder().Array("k", GgufType::kArray, 1, Bytes(32)).Build(),
       kUnserved,
       {"k is an array of arrays"}},
      {"BoolOf2",
       GgufBuilder().Raw("k", GgufType::kBool, "\2").Build(),
       kInvalid,
       {"k has a bool of 2"}},
      {"AlignmentOf3",
       GgufBuilder().U32("general.alignment", 3).Build(),
       kInvalid,
       {"general.alignment", "power of two", "have 3"}},
      {"AlignmentOf0",
       GgufBuilder().U32("general.alignment", 0).Build(),
       kInvalid,
       {"have 0"}},
      {"DuplicateTensor",
       GgufBuilder()
           .Tensor("t", {1}, kF32, Bytes(4))
           .Tensor("t", {1}, kF32, Bytes(4))
           .Build(),
       kInvalid,
       {"tensor t: occurs twice"}},
      {"TensorNameWithControlCharacters",
       GgufBuilder().Tensor("t\n", {1}, kF32, Bytes(4)).Build(),
       kInvalid,
       {"printable ASCII"}},
      {"LongTensorName",
       GgufBuilder().Tensor(std::string(128, 't'), {1}, kF32, "").Build(),
       kInvalid,
       {"has 128 bytes, but must have 1 to 127"}},
      {"NoDimensions",
       GgufBuilder().Tensor("t", {}, kF32, Bytes(4)).Build(),
       kInvalid,
       {"tensor t: has 0 dimensions; want 1 to 4"}},
      {"FiveDimensions",
       GgufBuilder().Tensor("t", {1, 1, 1, 1, 1}, kF32, Bytes(4)).Build(),
       kInvalid,
       {"has 5 dimensions"}},
      {"DimensionOf0",
       GgufBuilder().Tensor("t", {4, 0}, kF32, "").Build(),
       kInvalid,
       {"dimension 1 is 0"}},
      {"ProductThatOverflows",
       GgufBuilder()
           .Tensor("t", {uint64_t{1} << 40, uint64_t{1} << 40}, kF32, "")
           .Build(),
       kInvalid,
       {"dimension 1 is 1099511627776"}},
      {"UnknownTensorType",
       GgufBuilder().Tensor("t", {1}, 99, Bytes(4)).Build(),
       kInvalid,
       {"unknown type 99", "Q4_K"}},
      {"UnservedTensorType",
       GgufBuilder().Tensor("t", {256}, 16, Bytes(66)).Build(),
       kUnserved,
       {"tensor t has the type IQ2_XXS", "served are F32"}},
      {"PartOfABlock",
       GgufBuilder().Tensor("t", {33}, 8, Bytes(68)).Build(),
       kInvalid,
       {"a row has 33 numbers; want a multiple of 32"}},
      {"OffsetThatIsNotAligned",
       GgufBuilder().TensorAt("t", {1}, kF32, 4).Build(),
       kInvalid,
       {"its offset is 4", "alignment 32"}},
      {"TensorBeyondTheFile",
       GgufBuilder().TensorAt("t", {8}, kF32, 0).Build(),
       kDataLoss,
       {"tensor t: offset 0 plus 32 bytes", "truncated"}},
      {"OffsetThatOverflows",
       GgufBuilder().TensorAt("t", {8}, kF32, kHuge - 31).Build(),
       kDataLoss,
       {"offset 18446744073709551584"}},
      {"TensorsThatOverlap",
       GgufBuilder()
           .Tensor("a", {16}, kF32, Bytes(64))
           .TensorAt("b", {8}, kF32, 32)
           .Build(),
       kInvalid,
       {"tensor b begins", "tensor a ends only"}},
  };
}

class BadGgufTest : public ::testing::TestWithParam<BadFile> {};

TEST_P(BadGgufTest, AnInvalidHeaderIsRefusedWithTheInvalidValueAndItsPlace) {
  const absl::Status status = Parse(GetParam().file).status();
  EXPECT_EQ(status.code(), GetParam().code) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("x.gguf"));
  for (const std::string& part : GetParam().parts) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(part));
  }
}

INSTANTIATE_TEST_SUITE_P(All, BadGgufTest, ::testing::ValuesIn(BadFiles()),
                         [](const auto& param) { return param.param.name; });

TEST(GgufHeaderTest, EveryTruncatedFileIsRefused) {
  const std::string file = GgufBuilder()
                               .String("s", "text")
                               .Strings("ss", {"a", "b"})
                               .F32s("fs", {1, 2})
                               .Tensor("t", {2}, kF32, Bytes(8))
                               .Build();
  for (size_t size = 0; size < file.size(); ++size) {
    EXPECT_THAT(Parse(file.substr(0, size)),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr("x.gguf")))
        << size;
  }
}

TEST(GgufHeaderTest, AGitLfsPointerIsReportedInsteadOfParsed) {
  const base::TempFolder folder;
  const std::string path =
      folder.Write("x.gguf",
                   "version https://git-lfs.github.com/spec/v1\n"
                   "oid sha256:4665\nsize 16\n");
  EXPECT_THAT(
      GgufHeader::Open(path),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("Git LFS")));
}

}  // namespace
}  // namespace kvasir::model
