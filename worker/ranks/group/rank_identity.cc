#include "worker/ranks/group/rank_identity.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/text_format.h"

namespace kvasir::worker {
namespace {

using kvasir::v1::RankIdentity;

// The most bytes of a value in an error text: twice the length of an id, which
// has 64 hex digits.
constexpr size_t kMaxValueBytes = 128;

std::string Cut(std::string text, size_t most_bytes) {
  if (text.size() <= most_bytes) return text;
  text.resize(most_bytes);
  return text + "...";
}

// Escapes all characters that are not printable. Quotes stay as they are: our
// texts contain them, and no log line is delimited by quotes.
std::string Printable(absl::string_view text) {
  return absl::StrReplaceAll(absl::CHexEscape(text),
                             {{"\\'", "'"}, {"\\\"", "\""}});
}

std::string ValueText(const RankIdentity& identity,
                      const google::protobuf::FieldDescriptor* field) {
  std::string text;
  google::protobuf::TextFormat::PrintFieldValueToString(identity, field, -1,
                                                        &text);
  return text;
}

}  // namespace

std::optional<IdentityDifference> FirstDifference(
    const RankIdentity& leaders, const RankIdentity& followers) {
  const google::protobuf::Descriptor* descriptor = RankIdentity::descriptor();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const google::protobuf::FieldDescriptor* field = descriptor->field(i);
    const std::string want = ValueText(leaders, field);
    const std::string have = ValueText(followers, field);
    if (want == have) continue;
    return IdentityDifference{
        .field = field->number(),
        .text = absl::StrCat(field->name(), " is ", Cut(have, kMaxValueBytes),
                             ", the leader has ", Cut(want, kMaxValueBytes))};
  }
  return std::nullopt;
}

std::string RankName(const kvasir::v1::RankHello& hello) {
  return absl::StrCat("rank ", hello.rank(), " (", PeerName(hello.host()),
                      ", pid ", hello.pid(), ")");
}

std::string PeerName(absl::string_view name) {
  return Cut(Printable(name.substr(0, kMaxValueBytes)), kMaxValueBytes);
}

std::string PeerText(absl::string_view text) {
  return Cut(Printable(text.substr(0, kMaxPeerTextBytes)), kMaxPeerTextBytes);
}

absl::Status PeerStatus(int code, absl::string_view prefix,
                        absl::string_view text) {
  const bool known =
      code > static_cast<int>(absl::StatusCode::kOk) &&
      code <= static_cast<int>(absl::StatusCode::kUnauthenticated);
  return absl::Status(
      known ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown,
      absl::StrCat(prefix, PeerText(text)));
}

}  // namespace kvasir::worker
