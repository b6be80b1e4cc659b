#include "router/facades/text/text_stream.h"

#include <algorithm>
#include <string_view>
#include <utility>

namespace kvasir::router {

TextStream::TextStream(std::unique_ptr<Detokenizer> detokenizer,
                       TextStreamOptions options)
    : detokenizer_(std::move(detokenizer)), options_(std::move(options)) {
  for (const std::string& stop : options_.stop_strings) {
    longest_stop_bytes_ = std::max(longest_stop_bytes_, stop.size());
  }
}

TextStream::Piece TextStream::Push(std::span<const int32_t> ids) {
  Piece piece;
  for (const int32_t id : ids) {
    if (stopped_) break;
    ++num_tokens_;
    ++piece.num_used;
    piece.text += Absorb(detokenizer_->Push(id));
  }
  return piece;
}

std::string TextStream::Finish() {
  if (stopped_) return "";
  std::string text = Absorb(detokenizer_->Finish());
  text += held_;
  held_.clear();
  return text;
}

std::string TextStream::Absorb(const std::string& text) {
  if (longest_stop_bytes_ == 0) return text;
  if (num_tokens_ <= options_.min_tokens) return text;
  held_ += text;
  size_t first_end = std::string::npos;
  const std::string* matched = nullptr;
  for (const std::string& stop : options_.stop_strings) {
    if (stop.empty()) continue;
    const size_t at = held_.find(stop);
    if (at == std::string::npos) continue;
    const size_t end = at + stop.size();
    const bool longer =
        matched != nullptr && end == first_end && stop.size() > matched->size();
    if (end < first_end || longer) {
      first_end = end;
      matched = &stop;
    }
  }
  std::string released;
  if (matched != nullptr) {
    stopped_ = true;
    matched_stop_ = *matched;
    released = held_.substr(0, options_.include_stop_string
                                   ? first_end
                                   : first_end - matched->size());
    held_.clear();
    return released;
  }
  const size_t hold = HoldBackBytes();
  released = held_.substr(0, held_.size() - hold);
  held_.erase(0, held_.size() - hold);
  return released;
}

size_t TextStream::HoldBackBytes() const {
  // Hold back less than the longest stop string, because a complete stop string
  // would already have matched.
  const size_t most = std::min(held_.size(), longest_stop_bytes_ - 1);
  const std::string_view held(held_);
  for (size_t length = most; length > 0; --length) {
    const std::string_view tail = held.substr(held.size() - length);
    for (const std::string& stop : options_.stop_strings) {
      if (stop.size() > length && stop.compare(0, length, tail) == 0) {
        return length;
      }
    }
  }
  return 0;
}

}  // namespace kvasir::router
