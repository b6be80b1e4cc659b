#include "base/cli/dial.h"

#include <grpcpp/security/credentials.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/cli/flags.h"
#include "base/net/listen_address.h"
#include "base/read_file.h"
#include "base/status_macros.h"

namespace kvasir::cli {
namespace {

// The largest token file that is read. White space around the token is allowed.
constexpr size_t kMaxTokenFileBytes = 4096;

}  // namespace

absl::Status CheckPlainCall(const std::string& target, const char* remedy,
                            bool insecure) {
  if (insecure || base::IsLocalTarget(target)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the connection to ", target, " would not be encrypted: give ", remedy,
      ", or --insecure if something else protects it (a service mesh, a "
      "NetworkPolicy)"));
}

absl::StatusOr<std::string> ReadSecretFile(const char* flag,
                                           const std::string& path) {
  const auto wrong = [&](absl::string_view what) {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, " ", path, ": ", what));
  };
  const auto text = base::ReadFileOrPipe(path, kMaxTokenFileBytes);
  if (!text.ok()) return wrong(text.status().message());
  std::string token(absl::StripAsciiWhitespace(*text));
  // The error does not contain the value, because it may be a secret.
  if (token.empty() || token.size() > kMaxTokenBytes ||
      std::any_of(token.begin(), token.end(), [](char c) {
        return absl::ascii_isspace(static_cast<unsigned char>(c));
      })) {
    return wrong(absl::StrCat("must contain one token of at most ",
                              kMaxTokenBytes, " bytes, and nothing else"));
  }
  return token;
}

void AddDialTlsFlags(CLI::App* app, DialTlsFlags* options) {
  AddText(app, "--ca", options->ca,
          "PEM file of the authorities that may sign the server's certificate; "
          "without it: plain text")
      ->type_name("FILE");
  AddText(app, "--cert", options->certificate,
          "PEM file of this client's certificate chain, for a server that asks "
          "for it")
      ->type_name("FILE");
  AddText(app, "--key", options->key,
          "PEM file of the key that belongs to --cert")
      ->type_name("FILE");
  AddSwitch(app, "--insecure", options->insecure,
            "allow plain text to other machines");
  AddText(app, "--token-file", options->token_file,
          "file with the token to send with each call; needs --ca")
      ->type_name("FILE");
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> DialCredentials(
    const DialTlsFlags& flags, const std::string& target) {
  base::TlsOptions options;
  options.role = "server";
  options.files.certificate = flags.certificate;
  options.files.certificate_flag = "--cert";
  options.files.key = flags.key;
  options.files.key_flag = "--key";
  options.files.authorities = flags.ca;
  options.files.authorities_flag = "--ca";
  if (options.files.empty() && !flags.token_file.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("--token-file ", flags.token_file,
                     ": a token is sent only over TLS: give --ca, too"));
  }
  if (!options.files.empty()) {
    KVASIR_ASSIGN_OR_RETURN(auto tls, base::TlsChannelCredentials(options));
    if (flags.token_file.empty()) return tls;
    KVASIR_ASSIGN_OR_RETURN(const std::string token,
                            ReadSecretFile("--token-file", flags.token_file));
    // gRPC itself also refuses to send token credentials without TLS.
    return grpc::CompositeChannelCredentials(
        tls, grpc::AccessTokenCredentials(token));
  }
  KVASIR_RETURN_IF_ERROR(CheckPlainCall(target, "--ca", flags.insecure));
  return grpc::InsecureChannelCredentials();
}

}  // namespace kvasir::cli
