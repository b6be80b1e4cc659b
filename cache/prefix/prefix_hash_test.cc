#include "cache/prefix/prefix_hash.h"

#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "gtest/gtest.h"

namespace kvasir::cache {
namespace {

std::string Hex(const PrefixHash& hash) {
  return absl::BytesToHexString(
      std::string(hash.bytes.begin(), hash.bytes.end()));
}

TEST(PrefixHashTest, HashesAreEqualOnEveryMachine) {
  // The expected values come from Python's hashlib:
  // blake2b(key=blake2b(b"cache-1").digest(), digest_size=16). The root hashes
  // byte 00 and "tenant"; a page hashes byte 01, the parent's hash and the ids.
  const auto hasher = MakePrefixHasher("cache-1");
  const PrefixHash root = hasher->Root("tenant");
  EXPECT_EQ(Hex(root), "cb4289c2622e3dc4e928fe0ba5bfbe0d");
  EXPECT_EQ(Hex(hasher->Extend(root, {1, 2, 3, -1})),
            "3ceaa5a46625f6a1c80d8e6319efc59b");
  // More token ids than fit into the hasher's buffer.
  std::vector<int32_t> ids(150);
  std::iota(ids.begin(), ids.end(), 1000);
  EXPECT_EQ(Hex(hasher->Extend(root, ids)), "b8f6e05733e6a6c05c0708c7b43ee78b");
}

TEST(PrefixHashTest, EveryInputChangesTheHash) {
  const auto hasher = MakePrefixHasher("a");
  const PrefixHash root = hasher->Root("");
  const PrefixHash page = hasher->Extend(root, {1, 2});
  const std::set<std::string> names = {
      Hex(root),
      Hex(page),
      Hex(hasher->Root("x")),
      Hex(hasher->Extend(hasher->Root("x"), {1, 2})),
      Hex(hasher->Extend(page, {1, 2})),
      Hex(hasher->Extend(root, {2, 1})),
      Hex(hasher->Extend(root, {1, 2, 0})),
      Hex(MakePrefixHasher("b")->Root("")),
      // A salt whose bytes equal those of a page must have another hash.
      Hex(hasher->Root(std::string(root.bytes.begin(), root.bytes.end()))),
      Hex(hasher->Extend(root, {})),
  };
  EXPECT_EQ(names.size(), 10u);
}

TEST(PrefixHashTest, CacheIdsOfAnyLengthAreHashed) {
  const std::string long_id(1000, 'x');
  EXPECT_NE(Hex(MakePrefixHasher(long_id)->Root("")),
            Hex(MakePrefixHasher(long_id + "y")->Root("")));
  EXPECT_NE(Hex(MakePrefixHasher("")->Root("")),
            Hex(MakePrefixHasher("x")->Root("")));
}

}  // namespace
}  // namespace kvasir::cache
