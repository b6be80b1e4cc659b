#include "router/facades/text/tokenizer_bundle.h"

#include <archive.h>
#include <archive_entry.h>

#include <filesystem>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/sha256.h"
#include "base/status_matchers.h"
#include "base/temp_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::router {
namespace {

using base::StatusIs;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

class TokenizerBundleTest : public ::testing::Test {
 protected:
  static std::map<std::string, std::string> Unzip(const std::string& zip) {
    std::map<std::string, std::string> files;
    archive* reader = archive_read_new();
    archive_read_support_format_zip(reader);
    EXPECT_EQ(archive_read_open_memory(reader, zip.data(), zip.size()),
              ARCHIVE_OK);
    archive_entry* entry = nullptr;
    while (archive_read_next_header(reader, &entry) == ARCHIVE_OK) {
      std::string& bytes = files[archive_entry_pathname(entry)];
      char buffer[4096];
      la_ssize_t size = 0;
      while ((size = archive_read_data(reader, buffer, sizeof(buffer))) > 0) {
        bytes.append(buffer, static_cast<size_t>(size));
      }
    }
    archive_read_free(reader);
    return files;
  }

  const base::TempFolder folder_;
};

TEST_F(TokenizerBundleTest, TheArchiveContainsOnlyTheTokenizersFiles) {
  folder_.Write("tokenizer.json", "{}");
  folder_.Write("chat_template.jinja", "hello");
  folder_.Write("config.json", "{\"a\": 1}");
  folder_.Write("model.safetensors", "weights");
  folder_.Write("secret.txt", "no");
  std::filesystem::create_directories(folder_.File("tokenizer.model"));
  const auto archive = ArchiveTokenizer(folder_.path());
  KVASIR_ASSERT_OK(archive);
  EXPECT_THAT(Unzip(archive->zip),
              UnorderedElementsAre(Pair("tokenizer.json", "{}"),
                                   Pair("chat_template.jinja", "hello"),
                                   Pair("config.json", "{\"a\": 1}")));
  EXPECT_EQ(archive->sha256, base::Sha256Hex(archive->zip));
}

TEST_F(TokenizerBundleTest, TheSameTokenizerFilesGiveAnIdenticalArchive) {
  folder_.Write("vocab.json", "{}");
  folder_.Write("tokenizer.json", "{}");
  const auto first = ArchiveTokenizer(folder_.path());
  KVASIR_ASSERT_OK(first);
  folder_.Write("tokenizer.json", "{}");
  const auto second = ArchiveTokenizer(folder_.path());
  KVASIR_ASSERT_OK(second);
  EXPECT_EQ(first->sha256, second->sha256);
}

TEST_F(TokenizerBundleTest, TheErrorForAFolderWithoutATokenizerNamesTheFolder) {
  EXPECT_THAT(ArchiveTokenizer(folder_.path()).status(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr(folder_.path())));
  EXPECT_THAT(ArchiveTokenizer("/no/such").status(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("/no/such")));
}

TEST_F(TokenizerBundleTest, ATokenizerWithMoreFilesThanClientsAcceptIsRefused) {
  for (size_t i = 0; i <= kMaxBundleFiles; ++i) {
    folder_.Write(absl::StrCat(i, ".jinja"), "x");
  }
  EXPECT_THAT(
      ArchiveTokenizer(folder_.path()).status(),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("at most 50")));
}

TEST_F(TokenizerBundleTest, TheArchiveIsKeptOnceItsCreationHasSucceeded) {
  TokenizerBundle bundle(folder_.path());
  EXPECT_FALSE(bundle.Get().ok());
  folder_.Write("tokenizer.json", "{}");
  const auto first = bundle.Get();
  KVASIR_ASSERT_OK(first);
  EXPECT_EQ(*first, *bundle.Get());
}

TEST_F(TokenizerBundleTest,
       GeneratedFilesAreArchivedInsteadOfTheFilesInTheFolder) {
  int calls = 0;
  TokenizerBundle bundle(
      folder_.File("model.gguf"), [&calls]() -> absl::StatusOr<NamedFiles> {
        if (++calls == 1) return absl::UnavailableError("not yet");
        return NamedFiles{{"tokenizer.json", "{}"}, {"config.json", "{1}"}};
      });
  EXPECT_THAT(bundle.Get(),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("not yet")));
  KVASIR_ASSERT_OK_AND_ASSIGN(const auto archive, bundle.Get());
  EXPECT_THAT(Unzip(archive->zip),
              UnorderedElementsAre(Pair("tokenizer.json", "{}"),
                                   Pair("config.json", "{1}")));
  EXPECT_EQ(bundle.Get().value(), archive);
  EXPECT_EQ(calls, 2);
}

}  // namespace
}  // namespace kvasir::router
