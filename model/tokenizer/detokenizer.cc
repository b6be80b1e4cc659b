#include "model/tokenizer/detokenizer.h"

#include <algorithm>
#include <utility>

#include "model/tokenizer/detokenizer_stages.h"

namespace kvasir::model {
namespace {

// Only the last tokens of the context are decoded. Eight are enough to contain
// any character that the context leaves incomplete. After eight tokens, the
// start of the text, where spaces would be stripped, has passed.
constexpr size_t kContextTokens = 8;

}  // namespace

IncrementalDetokenizer::IncrementalDetokenizer(const Tokenizer& tokenizer,
                                               bool skip_special)
    : tokenizer_(&tokenizer),
      skip_special_(skip_special),
      state_(std::make_unique<DetokenizerState>(
          tokenizer.detokenizer().NewState())) {}
IncrementalDetokenizer::~IncrementalDetokenizer() = default;
IncrementalDetokenizer::IncrementalDetokenizer(
    IncrementalDetokenizer&&) noexcept = default;
IncrementalDetokenizer& IncrementalDetokenizer::operator=(
    IncrementalDetokenizer&&) noexcept = default;

void IncrementalDetokenizer::Prime(std::span<const int32_t> context) {
  size_t begin = context.size();
  for (size_t kept = 0; begin > 0 && kept < kContextTokens;) {
    const int32_t id = context[--begin];
    const bool skipped = skip_special_ && tokenizer_->IsSpecial(id);
    if (!skipped && tokenizer_->HasToken(id)) ++kept;
  }
  for (const int32_t id : context.subspan(begin)) Push(id);
}

std::string IncrementalDetokenizer::Push(int32_t id) {
  std::string delta;
  const std::string_view token = tokenizer_->IdToToken(id);
  if (!tokenizer_->HasToken(id) ||
      (skip_special_ && tokenizer_->IsSpecial(id))) {
    return delta;
  }
  tokenizer_->detokenizer().Push(token, state_.get(), &delta);
  return delta;
}

std::string IncrementalDetokenizer::Finish() {
  std::string rest;
  tokenizer_->detokenizer().Finish(state_.get(), &rest);
  return rest;
}

size_t IncrementalDetokenizer::pending_bytes() const {
  size_t total = 0;
  for (const auto& stage : state_->stages) total += stage.pending.size();
  return total;
}

}  // namespace kvasir::model
