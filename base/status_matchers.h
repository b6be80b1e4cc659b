// gtest helpers for absl::Status: tests check the specific code and text.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvasir::base {

inline const absl::Status& AsStatus(const absl::Status& status) {
  return status;
}
template <typename T>
const absl::Status& AsStatus(const absl::StatusOr<T>& result) {
  return result.status();
}

// The predicate of KVASIR_EXPECT_OK. It is not a gtest matcher, because a
// matcher is compiled again for every type of result.
inline ::testing::AssertionResult IsOk(const char* expression,
                                       const absl::Status& status) {
  if (status.ok()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << expression << " is " << status.ToString() << ", not OK";
}
template <typename T>
::testing::AssertionResult IsOk(const char* expression,
                                const absl::StatusOr<T>& result) {
  return IsOk(expression, result.status());
}

// Matches a status with this code and a message that matches `message`:
//   EXPECT_THAT(Load(path), StatusIs(absl::StatusCode::kNotFound,
//                                    HasSubstr("model.safetensors")));
MATCHER_P2(StatusIs, code, message, "") {
  const absl::Status& status = AsStatus(arg);
  *result_listener << status.ToString();
  return status.code() == code &&
         ::testing::ExplainMatchResult(message, std::string(status.message()),
                                       result_listener);
}

}  // namespace kvasir::base

#define KVASIR_ASSERT_OK(expression) \
  ASSERT_PRED_FORMAT1(::kvasir::base::IsOk, expression)
#define KVASIR_EXPECT_OK(expression) \
  EXPECT_PRED_FORMAT1(::kvasir::base::IsOk, expression)
#define KVASIR_ASSERT_OK_AND_ASSIGN(lhs, expression)                 \
  KVASIR_ASSERT_OK_AND_ASSIGN_IMPL_(                                 \
      KVASIR_MATCHERS_CONCAT_(kvasir_test_statusor_, __LINE__), lhs, \
      expression)
#define KVASIR_MATCHERS_CONCAT_INNER_(a, b) a##b
#define KVASIR_MATCHERS_CONCAT_(a, b) KVASIR_MATCHERS_CONCAT_INNER_(a, b)
#define KVASIR_ASSERT_OK_AND_ASSIGN_IMPL_(statusor, lhs, expression) \
  auto statusor = (expression);                                      \
  ASSERT_TRUE(::kvasir::base::IsOk(#expression, statusor));          \
  lhs = *std::move(statusor)
