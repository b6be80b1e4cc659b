#include "worker/ranks/gloo/gloo_address.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"

namespace kvasir::worker {
namespace {

using base::StatusIs;
using ::testing::HasSubstr;

constexpr char kSecret[] = "00112233445566778899aabbccddeeff";

TEST(GlooAddressTest, FormattingAParsedAddressGivesTheSameText) {
  for (const std::string& text : {
           absl::StrCat("kvasir-gloo-1 1 3 64 ", kSecret,
                        " 10.0.0.7:4000 - 127.0.0.1:65535"),
           absl::StrCat("kvasir-gloo-1 0 2 131072 ", kSecret, " - [fd00::5]:1"),
       }) {
    const auto address = ParseGlooAddress(text);
    KVASIR_ASSERT_OK(address);
    EXPECT_EQ(FormatGlooAddress(*address), text);
  }
}

TEST(GlooAddressTest, InvalidAddressesAreRefused) {
  const auto text = [](const std::string& numbers, const std::string& ports,
                       const std::string& secret = kSecret) {
    return absl::StrCat("kvasir-gloo-1 ", numbers, " ", secret, " ", ports);
  };
  const std::pair<std::string, std::string> cases[] = {
      {"", "does not begin with"},
      {"kvasir-gloo-2 0 2 64", "does not begin with"},
      {std::string(1 << 20, ' '), "1048576 bytes long"},
      {"kvasir-gloo-1", "as numbers"},
      {"kvasir-gloo-1 0 2 64", "as numbers"},
      {text("0 two 64", "- 127.0.0.1:1"), "as numbers"},
      {text("99999999999999999999 2 64", "- 127.0.0.1:1"), "as numbers"},
      {text("2 2 64", "- 127.0.0.1:1"), "rank 2 of 2"},
      {text("-1 2 64", "- 127.0.0.1:1"), "rank -1 of 2"},
      {text("0 1 64", "-"), "rank 0 of 1"},
      {text("0 100000 64", "-"), "of 100000"},
      {text("0 2 0", "- 127.0.0.1:1"), "chunks of 0 bytes"},
      {text("0 2 64", "- 127.0.0.1:1", "0011"), "32 lowercase hex digits"},
      {text("0 2 64", "- 127.0.0.1:1", std::string(32, 'G')),
       "32 lowercase hex digits"},
      {text("0 2 64", "-"),
       "must have 2 socket addresses, one for each rank, but has 1"},
      {text("0 2 64", "- 127.0.0.1:1 127.0.0.1:2"), "has 3"},
      {text("0 2 64", "127.0.0.1:1 -"), "for its own rank"},
      {text("0 2 64", "- -"), "for its own rank"},
      {text("0 2 64", "- 127.0.0.1"), "does not end with a port"},
      {text("0 2 64", "- 127.0.0.1:"), "does not end with a port"},
      {text("0 2 64", "- 127.0.0.1:0"), "does not end with a port"},
      {text("0 2 64", "- 127.0.0.1:65536"), "does not end with a port"},
      {text("0 2 64", "- localhost:1"), "'localhost' is neither"},
      {text("0 2 64", "- :1"), "'' is neither"},
      {text("0 2 64", "- []:1"), "neither an IPv4"},
      {text("0 2 64", "- ::1:1"), "in brackets"},
      {text("0 2 64", "- [127.0.0.1]:1"), "in brackets"},
      {text("0 2 64", "- [fe80::1%lo]:1"), "neither an IPv4"},
  };
  for (const auto& [address, why] : cases) {
    EXPECT_THAT(ParseGlooAddress(address),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(why)))
        << address.substr(0, 100);
  }
}

TEST(GlooAddressTest, NoErrorForAnInvalidAddressContainsTheSecret) {
  const auto address = ParseGlooAddress(
      absl::StrCat("kvasir-gloo-1 0 2 64 ", kSecret, "0 - 127.0.0.1:1"));
  EXPECT_THAT(address.status().ToString(), Not(HasSubstr("0011223344")));
}

TEST(FindInterfaceTest, AnInterfaceCanBeFoundByItsNameAndByItsAddress) {
  for (const std::string interface : {"lo", "127.0.0.1"}) {
    const auto found = FindInterface(interface);
    KVASIR_ASSERT_OK(found);
    EXPECT_EQ(found->bytes.ss_family, AF_INET);
  }
}

TEST(FindInterfaceTest,
     TheErrorForAnUnknownInterfaceListsTheExistingInterfaces) {
  // None of these is the name of an interface or an address of this machine.
  for (const std::string interface :
       {"", "eth77", "240.0.0.1", "2001:db8::1"}) {
    EXPECT_THAT(FindInterface(interface),
                StatusIs(absl::StatusCode::kNotFound,
                         AllOf(HasSubstr(absl::StrCat("'", interface, "'")),
                               HasSubstr("this machine's interfaces: "),
                               HasSubstr("lo"))));
  }
}

}  // namespace
}  // namespace kvasir::worker
