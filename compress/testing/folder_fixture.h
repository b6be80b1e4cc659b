// Test support: a folder of the test's own, and what its files hold.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace kvasir::compress {

// Owns: the folder, empty at first; it goes with the test.
class FolderTest : public ::testing::Test {
 protected:
  FolderTest() : folder_(Name()) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  ~FolderTest() override { std::filesystem::remove_all(folder_); }

  const std::filesystem::path folder_;

 private:
  static std::filesystem::path Name() {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    std::string name =
        absl::StrCat("kvasir_", test->test_suite_name(), "_", test->name());
    std::replace(name.begin(), name.end(), '/', '_');
    return std::filesystem::path(testing::TempDir()) / name;
  }
};

inline std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace kvasir::compress
