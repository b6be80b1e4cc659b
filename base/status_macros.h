// Macros that return early on an error, for functions that return absl::Status
// or StatusOr. Apart from the prefix, they have the names and the meaning of
// Abseil's own macros, which Debian's Abseil lacks.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define KVASIR_RETURN_IF_ERROR(expression)                                  \
  do {                                                                      \
    if (::absl::Status kvasir_status_ = (expression); !kvasir_status_.ok()) \
        [[unlikely]]                                                        \
      return kvasir_status_;                                                \
  } while (false)

#define KVASIR_STATUS_CONCAT_INNER_(a, b) a##b
#define KVASIR_STATUS_CONCAT_(a, b) KVASIR_STATUS_CONCAT_INNER_(a, b)

// Assigns the value, or returns the error: KVASIR_ASSIGN_OR_RETURN(auto
// x, ComputeX());
#define KVASIR_ASSIGN_OR_RETURN(lhs, expression) \
  KVASIR_ASSIGN_OR_RETURN_IMPL_(                 \
      KVASIR_STATUS_CONCAT_(kvasir_statusor_, __LINE__), lhs, expression)
#define KVASIR_ASSIGN_OR_RETURN_IMPL_(statusor, lhs, expression) \
  auto statusor = (expression);                                  \
  if (!statusor.ok()) [[unlikely]]                               \
    return std::move(statusor).status();                         \
  lhs = *std::move(statusor)
