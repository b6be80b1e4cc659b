#include "model/known_models.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <vector>

#include "base/status_matchers.h"
#include "base/temp_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::cli {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Found(const std::string& text) {
  const absl::StatusOr<std::string> folder = FindModel(text);
  return folder.ok() ? *folder : folder.status().ToString();
}

// Test fixture with an empty working directory and an empty model cache.
class KnownModelsTest : public ::testing::Test {
 protected:
  KnownModelsTest() {
    fs::create_directories(root_ / "here");
    fs::current_path(root_ / "here");
    Set("XDG_CACHE_HOME", (root_ / "cache").string());
    Set("HOME", (root_ / "home").string());
  }
  ~KnownModelsTest() override {
    fs::current_path(before_);
    for (const auto& [name, value] : saved_) {
      value ? setenv(name, value->c_str(), 1) : unsetenv(name);
    }
  }

  // Sets an environment variable; an empty `value` unsets it.
  void Set(const char* name, const std::string& value) {
    const char* old = std::getenv(name);
    saved_.emplace_back(
        name, old == nullptr ? std::nullopt : std::optional<std::string>(old));
    value.empty() ? unsetenv(name) : setenv(name, value.c_str(), 1);
  }
  // Makes the folder that models/fetch would make, and returns its path.
  std::string Fetch(const fs::path& cache) {
    const fs::path folder = cache / "kvasir/models/smollm2";
    fs::create_directories(folder);
    return folder.string();
  }

  const base::TempFolder folder_;
  const fs::path root_ = folder_.path();

 private:
  const fs::path before_ = fs::current_path();
  std::vector<std::pair<const char*, std::optional<std::string>>> saved_;
};

TEST_F(KnownModelsTest, TheNameOfAKnownModelIsReplacedByItsFolderInTheCache) {
  const std::string folder = Fetch(root_ / "cache");
  EXPECT_EQ(Found("smollm2"), folder);
}

TEST_F(KnownModelsTest, TheCacheIsInTheHomeFolderIfXdgCacheHomeIsNotSet) {
  Set("XDG_CACHE_HOME", "");
  const std::string folder = Fetch(root_ / "home/.cache");
  EXPECT_EQ(Found("smollm2"), folder);
  Set("HOME", "");
  EXPECT_EQ(CacheFolder(), "");
  EXPECT_THAT(FindModel("smollm2"),
              base::StatusIs(absl::StatusCode::kNotFound,
                             HasSubstr("neither XDG_CACHE_HOME nor HOME")));
}

TEST_F(KnownModelsTest, AFolderInTheWorkingDirectoryIsPreferredToTheCache) {
  Fetch(root_ / "cache");
  fs::create_directory("smollm2");
  EXPECT_EQ(Found("smollm2"), "smollm2");
}

TEST_F(KnownModelsTest,
       AFileWithTheNameOfAModelInTheWorkingDirectoryIsIgnored) {
  const std::string folder = Fetch(root_ / "cache");
  std::ofstream("smollm2") << "notes";
  EXPECT_EQ(Found("smollm2"), folder);
}

TEST_F(KnownModelsTest, TheErrorForAModelThatWasNotFetchedSaysHowToGetIt) {
  EXPECT_THAT(
      FindModel("smollm2"),
      base::StatusIs(absl::StatusCode::kNotFound,
                     AllOf(HasSubstr("models/fetch smollm2"),
                           HasSubstr((root_ / "cache/kvasir/models").string()),
                           HasSubstr("known models: smollm2"))));
}

TEST_F(KnownModelsTest, TheErrorForAnUnknownModelNameListsTheKnownNames) {
  EXPECT_THAT(FindModel("smolm2"),
              base::StatusIs(absl::StatusCode::kNotFound,
                             AllOf(HasSubstr("'smolm2'"),
                                   HasSubstr("known models are smollm2"))));
}

TEST_F(KnownModelsTest, TextsThatAreNotNamesOfKnownModelsAreReturnedUnchanged) {
  fs::create_directory("mine");
  std::ofstream("a-file") << "x";
  for (const char* text :
       {"mine", "./smollm2", "/no/such/folder", "no folder", "", "a-file"}) {
    EXPECT_EQ(Found(text), text);
  }
}

class ModelFlagTest : public KnownModelsTest {
 protected:
  int Parse(const std::vector<std::string>& arguments) {
    CLI::App app("", "kvasir");
    app.add_subcommand("drain");
    CLI::App* command = app.add_subcommand("compare");
    AddModelFlag(command, "--model", models_, "")->delimiter(',');
    command->add_option("candidate", candidates_)
        ->transform(ModelName(command, OtherNames::kAllowed));
    std::vector<const char*> argv{"kvasir"};
    for (const std::string& argument : arguments) {
      argv.push_back(argument.c_str());
    }
    return ParseAndRun(&app, static_cast<int>(argv.size()),
                       const_cast<char**>(argv.data()), ok_);
  }

  const int ok_ = kExitOk;
  std::vector<std::string> models_;
  std::vector<std::string> candidates_;
};

TEST_F(ModelFlagTest, TheModelFlagAcceptsNamesOfKnownModelsAndFolders) {
  const std::string folder = Fetch(root_ / "cache");
  EXPECT_EQ(Parse({"compare", "smollm2", "per-token:k4,v4", "other", "--model",
                   "smollm2,./mine"}),
            kExitOk);
  EXPECT_THAT(models_, ElementsAre(folder, "./mine"));
  EXPECT_THAT(candidates_, ElementsAre(folder, "per-token:k4,v4", "other"));
}

TEST_F(ModelFlagTest, AModelThatWasNotDownloadedIsAUsageError) {
  testing::internal::CaptureStderr();
  EXPECT_EQ(Parse({"compare", "--model", "smollm2"}), kExitUsage);
  EXPECT_EQ(Parse({"compare", "smollm2"}), kExitUsage);
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("--model: smollm2 was not downloaded"));
}

TEST_F(ModelFlagTest,
       AnInvalidModelInTheEnvironmentFailsOnlyCommandsThatUseAModel) {
  Set("KVASIR_MODEL", "smollm2");
  EXPECT_EQ(Parse({"drain"}), kExitOk);
  testing::internal::CaptureStderr();
  EXPECT_EQ(Parse({"compare"}), kExitUsage);
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("smollm2"));
}

}  // namespace
}  // namespace kvasir::cli
