#include "model/gguf/gguf_model.h"

#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_matchers.h"
#include "base/temp_folder.h"
#include "model/gguf/testing/gguf_builder.h"

namespace kvasir::model {
namespace {

using base::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

// Returns a file of a split model with one tensor. Only file 0 has the keys
// that describe the model.
GgufBuilder Part(int number, int count, const std::string& tensor) {
  GgufBuilder builder;
  builder.U32("split.no", static_cast<uint32_t>(number))
      .U32("split.count", static_cast<uint32_t>(count))
      .Raw("split.tensors.count", GgufType::kI32, std::string("\3\0\0\0", 4));
  if (number == 0) builder.String("general.architecture", "llama");
  builder.Tensor(tensor, {1}, 0, std::string(4, static_cast<char>(number)));
  return builder;
}

class SplitGgufTest : public ::testing::Test {
 protected:
  SplitGgufTest() {
    for (int i = 0; i < 3; ++i) Write(i, Part(i, 3, absl::StrCat("t", i)));
  }
  std::string Name(int number) const {
    return absl::StrFormat("m-%05d-of-00003.gguf", number + 1);
  }
  void Write(int number, const GgufBuilder& builder) {
    folder_.Write(Name(number), builder.Build());
  }
  absl::StatusOr<GgufModel> Open(int number = 0) const {
    return OpenGgufModel(folder_.File(Name(number)));
  }

  const base::TempFolder folder_;
};

TEST_F(SplitGgufTest, OpeningTheFirstFileOpensAllFiles) {
  KVASIR_ASSERT_OK_AND_ASSIGN(const GgufModel model, Open());
  ASSERT_EQ(model.files.size(), 3u);
  ASSERT_EQ(model.header.tensors().size(), 3u);
  EXPECT_NE(model.header.Find("general.architecture"), nullptr);
  for (size_t i = 0; i < 3; ++i) {
    const GgufTensor* tensor = model.header.FindTensor(absl::StrCat("t", i));
    ASSERT_NE(tensor, nullptr);
    EXPECT_EQ(tensor->file, i);
    std::vector<std::byte> bytes(4);
    KVASIR_EXPECT_OK(model.files[i].Read(tensor->begin_bytes, bytes));
    EXPECT_EQ(bytes[0], static_cast<std::byte>(i));
  }
}

TEST_F(SplitGgufTest, AModelThatIsNotSplitHasOneFile) {
  for (const uint32_t count : {0, 1}) {
    GgufBuilder builder;
    builder.U32("split.count", count);
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const GgufModel model,
        OpenGgufModel(folder_.Write("any-name", builder.Build())));
    EXPECT_EQ(model.files.size(), 1u);
  }
}

TEST_F(SplitGgufTest, TheErrorForAMissingFileNamesIt) {
  std::filesystem::remove(folder_.File(Name(1)));
  EXPECT_THAT(Open().status(),
              StatusIs(absl::StatusCode::kNotFound,
                       AllOf(HasSubstr("m-00002-of-00003.gguf"),
                             HasSubstr("file 2 of the 3 files"))));
}

TEST_F(SplitGgufTest, TheErrorForOpeningALaterFileNamesTheFirstFile) {
  EXPECT_THAT(Open(1).status(),
              StatusIs(kInvalid, AllOf(HasSubstr("file 2 of the 3 files"),
                                       HasSubstr("m-00001-of-00003.gguf"))));
}

TEST_F(SplitGgufTest, ASplitFileWhoseNameDoesNotMatchItsSplitCountIsRefused) {
  EXPECT_THAT(
      OpenGgufModel(folder_.Write("m.gguf", Part(0, 3, "t0").Build())).status(),
      StatusIs(kInvalid, AllOf(HasSubstr("split.count"),
                               HasSubstr("must end with -00001-of-00003"))));
  EXPECT_THAT(OpenGgufModel(folder_.Write("m-00001-of-00003.gguf",
                                          Part(0, 200000, "t0").Build()))
                  .status(),
              StatusIs(kInvalid, HasSubstr("have 200000")));
}

TEST_F(SplitGgufTest, SplitFilesThatDoNotBelongTogetherAreRefused) {
  Write(2, Part(1, 3, "t2"));
  EXPECT_THAT(Open().status(),
              StatusIs(kInvalid, AllOf(HasSubstr("m-00003-of-00003.gguf"),
                                       HasSubstr("split.no"),
                                       HasSubstr("want 2, have 1"))));
  Write(2, Part(2, 4, "t2"));
  EXPECT_THAT(Open().status(),
              StatusIs(kInvalid, AllOf(HasSubstr("split.count"),
                                       HasSubstr("want 3, have 4"))));
  Write(2, GgufBuilder());
  EXPECT_THAT(Open().status(), StatusIs(kInvalid, HasSubstr("no such key")));
  Write(2, Part(2, 3, "t1"));
  EXPECT_THAT(
      Open().status(),
      StatusIs(kInvalid, AllOf(HasSubstr("m-00003-of-00003.gguf: tensor t1"),
                               HasSubstr("earlier file"))));
  Write(2, Part(2, 3, "t2").Tensor("t3", {1}, 0, "1234"));
  EXPECT_THAT(Open().status(), StatusIs(kInvalid, HasSubstr("4, have 3")));
}

TEST(WithoutSplitNumberTest, OnlyASplitNumberIsRemovedFromAName) {
  EXPECT_EQ(WithoutSplitNumber("m-00001-of-00003"), "m");
  for (const char* name : {"m", "", "-00001-of-00003", "m-0001-of-00003",
                           "m-00001-of-0000x", "m-00001_of-00003"}) {
    EXPECT_EQ(WithoutSplitNumber(name), name);
  }
}

}  // namespace
}  // namespace kvasir::model
