// For tests: a temporary folder, and functions that write files in it.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "gtest/gtest.h"

namespace kvasir::base {

// Owns: the folder, which is empty at first. The destructor removes it with
//   its content.
// Threads: its methods may be called from any thread.
class TempFolder {
 public:
  TempFolder() : path_(::testing::TempDir() + "/kvasir-test-XXXXXX") {
    KVASIR_CHECK(mkdtemp(path_.data()) != nullptr);
  }
  ~TempFolder() {
    std::error_code ignored;  // for example, a file that is gone already
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  // The path of a file in the folder. The file need not exist.
  std::string File(absl::string_view name) const {
    return absl::StrCat(path_, "/", name);
  }
  // Creates or replaces the file `name` in the folder and returns its path.
  std::string Write(absl::string_view name, absl::string_view text) const {
    std::string file = File(name);
    std::ofstream out(file, std::ios::binary | std::ios::trunc);
    out.write(text.data(), static_cast<std::streamsize>(text.size()));
    KVASIR_CHECK(out.flush().good());
    return file;
  }

 private:
  std::string path_;
};

}  // namespace kvasir::base
