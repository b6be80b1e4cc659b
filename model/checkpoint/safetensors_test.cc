#include "model/checkpoint/safetensors.h"

#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_matchers.h"
#include "base/temp_folder.h"
#include "model/files/file.h"

namespace kvasir::model {
namespace {

using base::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string LengthPrefix(uint64_t length) {
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes;
}

class SafetensorsTest : public ::testing::Test {
 protected:
  std::string Write(const std::string& name, const std::string& bytes) {
    return folder_.Write(name, bytes);
  }
  std::string WriteFile(const std::string& name, const std::string& header,
                        const std::string& data) {
    return Write(name, absl::StrCat(LengthPrefix(header.size()), header, data));
  }

  const base::TempFolder folder_;
};

absl::Status HeaderStatus(const std::string& header, uint64_t data_bytes) {
  return ParseSafetensorsHeader(header, data_bytes, "x.safetensors").status();
}

TEST_F(SafetensorsTest, AGitLfsPointerIsReportedInsteadOfParsedAsAWeightFile) {
  const std::string path = Write("a.safetensors",
                                 "version https://git-lfs.github.com/spec/v1\n"
                                 "oid sha256:4665\nsize 16\n");
  for (const absl::Status& status : {SafetensorsFile::Open(path).status(),
                                     ReadSmallFile(path, 1 << 20).status()}) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition,
                                 AllOf(HasSubstr(path), HasSubstr("Git LFS"),
                                       HasSubstr("git lfs pull"))));
  }
}

TEST_F(SafetensorsTest, ReadsATensorsBytes) {
  const std::string path = WriteFile(
      "a.safetensors",
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[2,2],)"
      R"("data_offsets":[4,12]},"a":{"dtype":"F32","shape":[1],)"
      R"("data_offsets":[0,4]}}   )",
      "abcdefghijkl");
  KVASIR_ASSERT_OK_AND_ASSIGN(const SafetensorsFile file,
                              SafetensorsFile::Open(path));
  ASSERT_EQ(file.tensors().size(), 2u);
  const TensorInfo& b = file.tensors()[1];
  EXPECT_EQ(b.name, "b");
  EXPECT_EQ(b.type, TensorType::kBF16);
  EXPECT_EQ(b.shape, (std::vector<int64_t>{2, 2}));
  EXPECT_EQ(b.row_bytes(), 4u);
  std::string out(3, '\0');
  KVASIR_ASSERT_OK(
      file.Read(b, 5, std::as_writable_bytes(std::span<char>(out))));
  EXPECT_EQ(out, "jkl");
  EXPECT_THAT(file.Read(b, 6, std::as_writable_bytes(std::span<char>(out))),
              StatusIs(absl::StatusCode::kOutOfRange,
                       HasSubstr("cannot read 3 bytes from byte 6 on, because "
                                 "the tensor has only 8")));
}

TEST_F(SafetensorsTest, AnIndexOfTooManyValuesIsRefusedBeforeItIsParsed) {
  std::string index = R"({"weight_map":{},"x":[0)";
  for (int i = 0; i < 1'000'000; ++i) index += ",0";
  Write("model.safetensors.index.json", index);  // the JSON is not closed
  EXPECT_THAT(TensorStore::Open(folder_.path()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("more than 1000000 values")));
}

TEST_F(SafetensorsTest, RefusesTruncatedAndOversizedHeaders) {
  EXPECT_THAT(
      SafetensorsFile::Open(Write("a", "1234567")),
      StatusIs(absl::StatusCode::kDataLoss,
               HasSubstr("header length of 8 bytes, but its size is 7 bytes")));
  EXPECT_THAT(
      SafetensorsFile::Open(Write("b", LengthPrefix(3) + "{}")),
      StatusIs(absl::StatusCode::kDataLoss,
               HasSubstr("its header has 3 bytes, but only 2 bytes follow")));
  EXPECT_THAT(
      SafetensorsFile::Open(Write("c", LengthPrefix(~uint64_t{0}) + "{}")),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr("18446744073709551615"),
                     HasSubstr("limit is 100000000"))));
  EXPECT_THAT(SafetensorsFile::Open(folder_.path()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("not a regular file")));
  EXPECT_THAT(SafetensorsFile::Open(folder_.File("none")),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("none")));
}

TEST_F(SafetensorsTest,
       ReadingAFileThatWasTruncatedAfterOpeningReturnsAnError) {
  const std::string path = WriteFile(
      "a.safetensors",
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "abcdefgh");
  KVASIR_ASSERT_OK_AND_ASSIGN(const SafetensorsFile file,
                              SafetensorsFile::Open(path));
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
  std::string out(8, '\0');
  EXPECT_THAT(file.Read(file.tensors()[0], 0,
                        std::as_writable_bytes(std::span<char>(out))),
              StatusIs(absl::StatusCode::kDataLoss,
                       AllOf(HasSubstr("tensor a"), HasSubstr("truncated"))));
}

struct BadHeader {
  const char* name;
  const char* header;
  uint64_t data_bytes;
  const char* message;
};

class BadHeaderTest : public ::testing::TestWithParam<BadHeader> {};

TEST_P(BadHeaderTest, TheErrorForAnInvalidSafetensorsHeaderStatesTheReason) {
  EXPECT_THAT(HeaderStatus(GetParam().header, GetParam().data_bytes),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("x.safetensors"),
                             HasSubstr(GetParam().message))));
}

INSTANTIATE_TEST_SUITE_P(
    All, BadHeaderTest,
    ::testing::Values(
        BadHeader{"Empty", "", 0, "not valid JSON"},
        BadHeader{"NotJson", "{\"a\":", 0, "not valid JSON"},
        BadHeader{"TrailingText", "{} x", 0, "not valid JSON"},
        BadHeader{"NotUtf8", "{\"\xff\":1}", 0, "not valid JSON"},
        BadHeader{"RootIsArray", "[]", 0, "must be a JSON object"},
        BadHeader{"RootIsNumber", "1", 0, "must be a JSON object"},
        BadHeader{"TensorIsNumber", R"({"a":1})", 0, "tensor a"},
        BadHeader{"TensorIsNull", R"({"a":null})", 0, "unexpected null"},
        BadHeader{"DeepNesting", R"({"a":{"shape":[[[[[[1]]]]]]}})", 0,
                  "unexpected an array"},
        BadHeader{"NestedObject", R"({"a":{"dtype":{"x":{}}}})", 0,
                  "unexpected an object"},
        BadHeader{"UnknownType",
                  R"({"a":{"dtype":"F7","shape":[],"data_offsets":[0,0]}})", 0,
                  "unknown dtype \"F7\""},
        BadHeader{"UnknownField", R"({"a":{"dtyp":"F32"}})", 0,
                  "unknown field \"dtyp\""},
        BadHeader{"MissingField", R"({"a":{"dtype":"F32","shape":[0]}})", 0,
                  "want dtype, shape and data_offsets"},
        BadHeader{"MetadataNotStrings", R"({"__metadata__":{"a":1}})", 0,
                  "unexpected 1"},
        BadHeader{"SameNameTwice",
                  R"({"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},)"
                  R"("a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}})",
                  0, "tensor a: is defined twice"},
        BadHeader{"TypeTwice", R"({"a":{"dtype":"U8","dtype":"U8"}})", 0,
                  "has two fields dtype"},
        BadHeader{"NegativeDimension", R"({"a":{"shape":[-1]}})", 0,
                  "unexpected -1"},
        BadHeader{"FractionDimension", R"({"a":{"shape":[1.5]}})", 0,
                  "unexpected 1.5"},
        BadHeader{"HugeDimension", R"({"a":{"shape":[18446744073709551615]}})",
                  0, "above 2^63 - 1"},
        BadHeader{"NumberOutOfRange", R"({"a":{"shape":[1e999]}})", 0,
                  "not valid JSON"},
        BadHeader{"TooManyDimensions",
                  R"({"a":{"shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]}})", 0,
                  "at most 16 dimensions"},
        BadHeader{"CountOverflows",
                  R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],)"
                  R"("data_offsets":[0,0]}})",
                  0, "is not a whole number of bytes"},
        BadHeader{"SizeOverflows",
                  R"({"a":{"dtype":"F32","shape":[4611686018427387904],)"
                  R"("data_offsets":[0,0]}})",
                  0, "is not a whole number of bytes"},
        BadHeader{"OddHalfBytes",
                  R"({"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}})", 1,
                  "is not a whole number of bytes"},
        BadHeader{"OneOffset", R"({"a":{"data_offsets":[0]}})", 0,
                  "want 2 entries"},
        BadHeader{"ThreeOffsets", R"({"a":{"data_offsets":[0,1,2]}})", 0,
                  "want 2 entries"},
        BadHeader{"EndBeforeBegin", R"({"a":{"data_offsets":[8,4]}})", 8,
                  "end 4 is before begin 8"},
        BadHeader{"WrongSize",
                  R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})",
                  4, "takes 8 bytes, but data_offsets give 4"},
        BadHeader{"PastTheFile",
                  R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
                  7, "end at 8, but the file's data has 7"},
        BadHeader{"Overlap",
                  R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                  R"("b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
                  6, "tensor b: data_offsets begin at 2, want 4"},
        BadHeader{"SamePlace",
                  R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                  R"("b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
                  4, "begin at 0, want 4"},
        BadHeader{"Hole",
                  R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                  R"("b":{"dtype":"U8","shape":[1],"data_offsets":[5,6]}})",
                  6, "begin at 5, want 4"},
        BadHeader{"TrailingData",
                  R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})", 5,
                  "cover 4 bytes, but the data after the header has 5 bytes"}),
    [](const auto& test) { return test.param.name; });

TEST_F(SafetensorsTest, AnEmptyTensorMayStartAtTheOffsetOfAnotherTensor) {
  KVASIR_EXPECT_OK(
      HeaderStatus(R"({"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                   R"("a":{"dtype":"U8","shape":[0,9223372036854775807,3],)"
                   R"("data_offsets":[0,0]},)"
                   R"("c":{"dtype":"F32","shape":[],"data_offsets":[4,8]}})",
                   8));
}

constexpr char kOneTensor[] =
    R"({"%s":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";

TEST_F(SafetensorsTest, AShardedFolderIsReadByItsIndexFile) {
  WriteFile("s1.safetensors", absl::StrFormat(kOneTensor, "a"), "x");
  WriteFile("s2.safetensors", absl::StrFormat(kOneTensor, "b"), "y");
  Write("model.safetensors.index.json",
        R"({"weight_map":{"a":"s1.safetensors","b":"s2.safetensors"}})");
  KVASIR_ASSERT_OK_AND_ASSIGN(const TensorStore store,
                              TensorStore::Open(folder_.path()));
  ASSERT_NE(store.Find("b"), nullptr);
  EXPECT_EQ(store.Find("b")->file->path(), folder_.File("s2.safetensors"));
  EXPECT_EQ(store.Find("c"), nullptr);
}

TEST_F(SafetensorsTest, ASingleFileIsPreferredToShardsIfTheIndexDoesNotListIt) {
  WriteFile("model.safetensors", absl::StrFormat(kOneTensor, "a"), "n");
  WriteFile("s1.safetensors", absl::StrFormat(kOneTensor, "a"), "x");
  for (const char* shard : {"s1.safetensors", "gone.safetensors"}) {
    Write("model.safetensors.index.json",
          absl::StrFormat(R"({"weight_map":{"a":"%s"}})", shard));
    ::testing::internal::CaptureStderr();
    const auto store = TensorStore::Open(folder_.path());
    const std::string log = ::testing::internal::GetCapturedStderr();
    KVASIR_ASSERT_OK(store);
    EXPECT_EQ(store->Find("a")->file->path(),
              folder_.File("model.safetensors"));
    for (const char* name :
         {"/model.safetensors", "/model.safetensors.index.json"}) {
      EXPECT_THAT(log, HasSubstr(folder_.path() + name));
    }
  }
}

TEST_F(SafetensorsTest, AnIndexThatListsTheSingleFileItselfIsUsed) {
  WriteFile("model.safetensors", absl::StrFormat(kOneTensor, "a"), "x");
  WriteFile("base.safetensors", absl::StrFormat(kOneTensor, "b"), "y");
  Write("model.safetensors.index.json",
        R"({"weight_map":{"a":"model.safetensors","b":"base.safetensors"}})");
  KVASIR_ASSERT_OK_AND_ASSIGN(const TensorStore store,
                              TensorStore::Open(folder_.path()));
  EXPECT_NE(store.Find("a"), nullptr);
  EXPECT_NE(store.Find("b"), nullptr);
}

TEST_F(SafetensorsTest, AShardMayHoldTensorsThatTheIndexDoesNotList) {
  WriteFile("s1.safetensors",
            R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
            R"("b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
            "xy");
  Write("model.safetensors.index.json",
        R"({"weight_map":{"b":"s1.safetensors"}})");
  KVASIR_ASSERT_OK_AND_ASSIGN(const TensorStore store,
                              TensorStore::Open(folder_.path()));
  EXPECT_NE(store.Find("b"), nullptr);
  EXPECT_EQ(store.Find("a"), nullptr);
}

TEST_F(SafetensorsTest, AnIndexThatNamesAFileOutsideTheModelFolderIsRefused) {
  for (const char* shard :
       {"../s1.safetensors", "/etc/x.safetensors", "sub/s1.safetensors",
        "..\\\\s1.safetensors", "s1\\u0000.safetensors", "passwd"}) {
    Write("model.safetensors.index.json",
          absl::StrFormat(R"({"weight_map":{"a":"%s"}})", shard));
    EXPECT_THAT(TensorStore::Open(folder_.path()),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("tensor a"), HasSubstr("plain name"))))
        << shard;
  }
}

TEST_F(SafetensorsTest, AnIndexThatDoesNotMatchItsShardFilesIsRefused) {
  WriteFile("s1.safetensors", absl::StrFormat(kOneTensor, "a"), "x");
  Write("model.safetensors.index.json",
        R"({"weight_map":{"b":"s1.safetensors"}})");
  EXPECT_THAT(TensorStore::Open(folder_.path()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("tensor b: the index says that it is in "
                                 "s1.safetensors, which does not have it")));
  Write("model.safetensors.index.json",
        R"({"weight_map":{"a":"s2.safetensors"}})");
  EXPECT_THAT(
      TensorStore::Open(folder_.path()),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr("s2.safetensors")));
  Write("model.safetensors.index.json", R"({"weight_map":[]})");
  EXPECT_THAT(
      TensorStore::Open(folder_.path()),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("weight_map")));
  Write("model.safetensors.index.json", "{");
  EXPECT_THAT(TensorStore::Open(folder_.path()),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("not valid JSON")));
}

TEST_F(SafetensorsTest, AFingerprintDependsOnEveryByteOfASmallFile) {
  const std::string header =
      R"({"a":{"dtype":"U8","shape":[200000],"data_offsets":[0,200000]}})";
  std::string data(200000, 'x');
  const auto fingerprint = [&] {
    WriteFile("model.safetensors", header, data);
    auto file = SafetensorsFile::Open(folder_.File("model.safetensors"));
    KVASIR_EXPECT_OK(file.status());
    auto text = file->Fingerprint();
    KVASIR_EXPECT_OK(text.status());
    return *text;
  };
  const std::string first = fingerprint();
  EXPECT_EQ(first.size(), 32u);
  EXPECT_EQ(fingerprint(), first);
  for (const size_t place : {size_t{0}, size_t{65536}, size_t{99999},
                             size_t{131071}, data.size() - 1}) {
    data[place] = 'y';
    EXPECT_NE(fingerprint(), first) << place;
    data[place] = 'x';
  }
}

TEST_F(SafetensorsTest, ALinkedFileMustHaveTheFingerprintInTheIndex) {
  WriteFile("s1.safetensors", absl::StrFormat(kOneTensor, "a"), "x");
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const SafetensorsFile file,
      SafetensorsFile::Open(folder_.File("s1.safetensors")));
  KVASIR_ASSERT_OK_AND_ASSIGN(const std::string fingerprint,
                              file.Fingerprint());
  const auto open = [&](const std::string& linked) {
    Write("model.safetensors.index.json",
          absl::StrCat(R"({"metadata":{"linked_files":)", linked,
                       R"(},"weight_map":{"a":"s1.safetensors"}})"));
    return TensorStore::Open(folder_.path()).status();
  };
  const std::string right =
      absl::StrFormat(R"({"s1.safetensors":"%s"})", fingerprint);
  KVASIR_EXPECT_OK(open(right));
  EXPECT_THAT(open("[]"), StatusIs(absl::StatusCode::kInvalidArgument,
                                   HasSubstr("linked_files")));
  EXPECT_THAT(open(R"({"s1.safetensors":1})"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("s1.safetensors: want the fingerprint")));
  EXPECT_THAT(open(R"({"s2.safetensors":""})"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("s2.safetensors: want the fingerprint")));
  // A file with the same header and size, but other weights.
  WriteFile("s1.safetensors", absl::StrFormat(kOneTensor, "a"), "y");
  EXPECT_THAT(
      open(right),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               AllOf(HasSubstr("s1.safetensors"),
                     HasSubstr("its fingerprint must be " + fingerprint))));
}

TEST_F(SafetensorsTest,
       TheErrorForAFolderWithoutTensorFilesListsTheExpectedFiles) {
  EXPECT_THAT(
      TensorStore::Open(folder_.path()),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr("model.safetensors")));
}

}  // namespace
}  // namespace kvasir::model
