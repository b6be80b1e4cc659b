#include "router/identity/credentials.h"

#include <string>

#include "base/sha256.h"
#include "gtest/gtest.h"

namespace kvasir::router {
namespace {

Credentials Read(const std::string& value) {
  Credentials credentials;
  ReadAuthorization(value, &credentials);
  return credentials;
}

TEST(CredentialsTest, OnlyTheHashOfABearerTokenIsKept) {
  for (const char* value : {"Bearer abc-._~+/=", "bearer abc-._~+/="}) {
    const Credentials read = Read(value);
    EXPECT_EQ(read.token, Credentials::Token::kGiven) << value;
    EXPECT_EQ(read.token_sha256, base::Sha256Hex("abc-._~+/="));
  }
  EXPECT_EQ(Read("Bearer " + std::string(512, 'x')).token,
            Credentials::Token::kGiven);
}

TEST(CredentialsTest, WithoutAnAuthorizationHeaderThereIsNoToken) {
  EXPECT_EQ(Read("").token, Credentials::Token::kNone);
}

TEST(CredentialsTest, AHeaderThatIsNotOneBearerTokenIsMalformed) {
  const std::string cases[] = {"abc",
                               "Basic YTpi",
                               "Bearer",
                               "Bearer ",
                               "Bearer  abc",
                               "Bearer a b",
                               "Bearer a,Bearer b",
                               "Bearer abc ",
                               "Bearer " + std::string(513, 'x'),
                               std::string("Bearer a\0b", 10),
                               "Bearer \xc3\xa4"};
  for (const std::string& value : cases) {
    const Credentials read = Read(value);
    EXPECT_EQ(read.token, Credentials::Token::kMalformed) << value;
    EXPECT_EQ(read.token_sha256, "") << value;
  }
}

}  // namespace
}  // namespace kvasir::router
