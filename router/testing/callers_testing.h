// Makes identities files for tests. Each tenant's token is the tenant's name.
#pragma once

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/sha256.h"
#include "router/identity/callers.h"

namespace kvasir::router {

// Returns the JSON entry of a tenant for --identities. `fields` are further
// JSON fields, for example `"quota": {...}`.
inline std::string TenantEntry(const std::string& name,
                               const std::string& fields = "") {
  return absl::StrCat(
      R"({"name": ")", name, R"(", "tokens": [{"label": "t", "sha256": ")",
      base::Sha256Hex(name), R"("}])", fields.empty() ? "" : ", ", fields, "}");
}

inline std::shared_ptr<const Callers> CallersOf(
    const std::string& entries,
    const base::Clock* clock = &base::Clock::Real()) {
  const std::string file =
      absl::StrCat(R"({"schema_version": 1, "tenants": [)", entries, "]}");
  auto callers = Callers::Open({.name = "test",
                                .read = [file] { return file; },
                                .proof = {.tls = true,
                                          .client_certificates = true,
                                          .admin_certificates = true},
                                .clock = clock},
                               nullptr);
  KVASIR_CHECK(callers.ok());
  return *callers;
}

inline Credentials TokenOf(const std::string& name) {
  return {.encrypted = true,
          .token = Credentials::Token::kGiven,
          .token_sha256 = base::Sha256Hex(name)};
}

inline uint32_t RunningOf(const Callers& callers, const std::string& name) {
  return callers.Identify(TokenOf(name), kvasir::v1::CLIENT)->quota->running();
}

}  // namespace kvasir::router
