// Test support: a temporary folder for each test, and a function that reads a
// file.
#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "base/temp_folder.h"
#include "gtest/gtest.h"

namespace kvasir::compress {

class FolderTest : public ::testing::Test {
 protected:
  const base::TempFolder owned_;
  const std::filesystem::path folder_ = owned_.path();
};

inline std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace kvasir::compress
