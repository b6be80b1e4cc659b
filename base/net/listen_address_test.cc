#include "base/net/listen_address.h"

#include <netdb.h>

#include <vector>

#include "gtest/gtest.h"

namespace kvasir::base {
namespace {

// Calls CountAddresses for a list that has one address for each of `families`.
int Count(const std::vector<int>& families) {
  std::vector<addrinfo> found(families.size());
  for (size_t i = 0; i < found.size(); ++i) {
    found[i].ai_family = families[i];
    if (i > 0) found[i - 1].ai_next = &found[i];
  }
  return CountAddresses(found.empty() ? nullptr : found.data());
}

TEST(CountAddressesTest, ReturnsTheLargerOfTheCountsOfIpv4AndIpv6Addresses) {
  EXPECT_EQ(Count({}), 0);
  EXPECT_EQ(Count({AF_INET}), 1);
  EXPECT_EQ(Count({AF_INET, AF_INET6}), 1) << "one address of each family";
  EXPECT_EQ(Count({AF_INET6, AF_INET, AF_INET6}), 2);
  EXPECT_EQ(Count({AF_INET, AF_INET6, AF_INET, AF_INET}), 3);
}

TEST(CountAddressesTest, ANumericAddressCountsAsOneAndAnUnknownHostNameAsZero) {
  EXPECT_EQ(CountAddresses("127.0.0.1"), 1);
  EXPECT_EQ(CountAddresses("::1"), 1);
  EXPECT_EQ(CountAddresses("no name at all"), 0);
}

}  // namespace
}  // namespace kvasir::base
