#include "model/gguf/gguf_blocks.h"

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "base/status_matchers.h"
#include "model/files/file.h"
#include "model/files/json.h"

namespace kvasir::model {
namespace {

std::string BytesOf(const nlohmann::json& hex) {
  return absl::HexStringToBytes(hex.get<std::string>());
}

TEST(GgufBlocksTest, UnpackedNumbersOfEveryTypeEqualThoseOfTheReference) {
  const std::string path = std::string(std::getenv("KVASIR_SOURCE_DIR")) +
                           "/tests/golden/gguf/blocks.json";
  KVASIR_ASSERT_OK_AND_ASSIGN(const std::string text,
                              ReadSmallFile(path, 1 << 20));
  KVASIR_ASSERT_OK_AND_ASSIGN(const nlohmann::json cases,
                              ParseJson(text, path));
  std::vector<std::string> tested;
  for (const auto& [name, entry] : cases.items()) {
    SCOPED_TRACE(name);
    const GgmlType* const type = FindGgmlType(entry["type"].get<uint32_t>());
    ASSERT_NE(type, nullptr);
    EXPECT_EQ(type->name, name);
    const std::string blocks = BytesOf(entry["blocks"]);
    const std::string want = BytesOf(entry["numbers"]);
    const size_t block_bytes = static_cast<size_t>(type->block_bytes);
    const size_t numbers = static_cast<size_t>(type->block_numbers);
    ASSERT_EQ(blocks.size() / block_bytes * numbers * sizeof(float),
              want.size());
    for (size_t i = 0; i < blocks.size() / block_bytes; ++i) {
      std::vector<float> have(numbers, -123);
      // The copy has exactly the block's size, so that AddressSanitizer reports
      // a read beyond it.
      const std::vector<uint8_t> block(
          blocks.begin() + static_cast<std::ptrdiff_t>(i * block_bytes),
          blocks.begin() + static_cast<std::ptrdiff_t>((i + 1) * block_bytes));
      type->unpack(block.data(), have.data());
      EXPECT_EQ(
          std::memcmp(have.data(), want.data() + i * numbers * sizeof(float),
                      numbers * sizeof(float)),
          0)
          << "block " << i;
    }
    tested.push_back(name);
  }
  // ServedGgmlTypes lists each type that was tested.
  std::string served = ServedGgmlTypes();
  for (const std::string& name : tested) {
    EXPECT_THAT(served, ::testing::HasSubstr(name));
  }
  EXPECT_EQ(tested.size(), 15u);
}

TEST(GgufBlocksTest, TheNameOfAnUnsupportedTypeIsKnown) {
  EXPECT_EQ(FindGgmlType(16), nullptr);
  EXPECT_EQ(UnservedGgmlTypeName(16), "IQ2_XXS");
  EXPECT_EQ(FindGgmlType(4), nullptr);
  EXPECT_EQ(UnservedGgmlTypeName(4), "");
}

}  // namespace
}  // namespace kvasir::model
