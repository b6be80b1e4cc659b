#include "model/tokenizer/detokenizer_stages.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace kvasir::model {
namespace {

constexpr std::string_view kDecoders =
    "Sequence, ByteLevel, Metaspace, Replace, ByteFallback, Fuse, Strip";

// If a replacement would make the text of a token longer than this, the text
// stays as it is.
constexpr size_t kMaxTokenTextBytes = size_t{1} << 20;
constexpr int64_t kMaxStripped = 1024;

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

// Returns the byte that a byte token stands for: 10 for "<0x0A>".
std::optional<uint8_t> ByteOfToken(std::string_view token) {
  if (token.size() != 6 || token.substr(0, 3) != "<0x" || token[5] != '>') {
    return std::nullopt;
  }
  const int high = HexDigit(token[3]);
  const int low = HexDigit(token[4]);
  if (high < 0 || low < 0) return std::nullopt;
  return static_cast<uint8_t>(16 * high + low);
}

std::string ByteLevelBytes(std::string_view token) {
  // An added token may contain characters outside the byte-level alphabet. Its
  // text is then used unchanged.
  return BytesOfByteLevel(token).value_or(std::string(token));
}

std::string ReplaceLiteral(std::string_view text, std::string_view from,
                           std::string_view to) {
  std::string out;
  size_t done = 0;
  for (size_t at = text.find(from); at != std::string_view::npos;
       at = text.find(from, done)) {
    out.append(text.substr(done, at - done));
    out.append(to);
    done = at + from.size();
  }
  out.append(text.substr(done));
  return out;
}

bool StartsWith(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

bool EndsWith(std::string_view text, std::string_view suffix) {
  return text.size() >= suffix.size() &&
         text.substr(text.size() - suffix.size()) == suffix;
}

}  // namespace

absl::StatusOr<DetokenizerStages::Step> DetokenizerStages::ReadStep(
    const std::string& type, const JsonRef& ref) {
  Step step;
  if (type == "ByteLevel") {
    step.kind = Kind::kByteLevel;
  } else if (type == "ByteFallback") {
    step.kind = Kind::kByteFallback;
  } else if (type == "Fuse") {
    step.kind = Kind::kFuse;
  } else if (type == "Metaspace") {
    step.kind = Kind::kMetaspace;
    KVASIR_ASSIGN_OR_RETURN(const char32_t replacement,
                            ref.GetChar("replacement"));
    AppendUtf8(replacement, &step.content);
    KVASIR_ASSIGN_OR_RETURN(const auto scheme, ref.Find("prepend_scheme"));
    if (scheme) {
      KVASIR_ASSIGN_OR_RETURN(const std::string name, scheme->String());
      step.drop_first = name != "never";
    } else {
      KVASIR_ASSIGN_OR_RETURN(step.drop_first,
                              ref.GetBool("add_prefix_space", true));
    }
  } else if (type == "Replace") {
    step.kind = Kind::kReplace;
    KVASIR_ASSIGN_OR_RETURN(step.content, ref.GetString("content"));
    KVASIR_ASSIGN_OR_RETURN(const JsonRef pattern, ref.Get("pattern"));
    KVASIR_ASSIGN_OR_RETURN(TextPattern compiled,
                            TextPattern::FromJson(pattern));
    step.pattern.push_back(std::move(compiled));
  } else if (type == "Strip") {
    step.kind = Kind::kStrip;
    KVASIR_ASSIGN_OR_RETURN(const char32_t content, ref.GetChar("content"));
    AppendUtf8(content, &step.content);
    KVASIR_ASSIGN_OR_RETURN(step.start, ref.GetInt("start", 0));
    KVASIR_ASSIGN_OR_RETURN(step.stop, ref.GetInt("stop", 0));
    for (const int64_t count : {step.start, step.stop}) {
      if (count < 0 || count > kMaxStripped) {
        return absl::InvalidArgumentError(
            absl::StrCat(ref.path(), " strips ", count,
                         " characters, but may strip 0 to ", kMaxStripped));
      }
    }
  } else {
    KVASIR_ASSIGN_OR_RETURN(const JsonRef name, ref.Get("type"));
    return name.Unsupported(kDecoders);
  }
  return step;
}

absl::Status DetokenizerStages::CheckOrder(const Step& step,
                                           const JsonRef& ref) const {
  bool fused = false;
  bool after_bytes = false;
  for (const Step& before : steps_) {
    fused =
        fused || before.kind == Kind::kFuse || before.kind == Kind::kByteLevel;
    after_bytes = !fused && (after_bytes || before.kind == Kind::kByteFallback);
  }
  // These stages give the same text whether they receive a run of byte tokens
  // as a whole or character by character.
  const bool any_pieces =
      step.kind == Kind::kFuse || step.kind == Kind::kByteLevel ||
      step.kind == Kind::kMetaspace ||
      (step.kind == Kind::kReplace && step.pattern.front().is_literal() &&
       NumChars(step.pattern.front().literal()) == 1);
  if (fused && step.kind != Kind::kFuse && step.kind != Kind::kStrip) {
    KVASIR_ASSIGN_OR_RETURN(const JsonRef name, ref.Get("type"));
    return name.Unsupported("Fuse and Strip after Fuse or ByteLevel");
  }
  if (after_bytes && !any_pieces) {
    KVASIR_ASSIGN_OR_RETURN(const JsonRef name, ref.Get("type"));
    return name.Unsupported(
        "Fuse, ByteLevel, Metaspace and the Replace of one character after "
        "ByteFallback");
  }
  return absl::OkStatus();
}

absl::StatusOr<DetokenizerStages> DetokenizerStages::FromJson(
    const JsonRef& ref) {
  DetokenizerStages stages;
  stages.joined_by_spaces_ = false;
  bool fused = false;
  const absl::Status visited = VisitComponents(
      ref, "decoders",
      [&](const std::string& type, const JsonRef& item) -> absl::Status {
        KVASIR_ASSIGN_OR_RETURN(Step step, ReadStep(type, item));
        KVASIR_RETURN_IF_ERROR(stages.CheckOrder(step, item));
        if (fused && step.kind == Kind::kStrip) step.kind = Kind::kStripFused;
        fused =
            fused || step.kind == Kind::kFuse || step.kind == Kind::kByteLevel;
        stages.steps_.push_back(std::move(step));
        return absl::OkStatus();
      });
  if (!visited.ok()) return visited;
  return stages;
}

DetokenizerState DetokenizerStages::NewState() const {
  DetokenizerState state;
  // One state for each step, and one that counts the tokens of a file without a
  // decoder: they are joined by spaces.
  state.stages.resize(steps_.size() + 1);
  return state;
}

void DetokenizerStages::Push(std::string_view token, DetokenizerState* state,
                             std::string* out) const {
  Feed(0, token, state, out);
}

std::string DetokenizerStages::ReplaceIn(const Step& step,
                                         std::string_view token) {
  const TextPattern& pattern = step.pattern.front();
  if (pattern.is_literal() &&
      token.find(pattern.literal()) == std::string_view::npos) {
    return std::string(token);
  }
  auto replaced = ReplaceAll(pattern, step.content, token, kMaxTokenTextBytes);
  return replaced.ok() ? *std::move(replaced) : std::string(token);
}

std::string DetokenizerStages::StripToken(const Step& step,
                                          std::string_view token) {
  for (int64_t i = 0; i < step.start && StartsWith(token, step.content); ++i) {
    token.remove_prefix(step.content.size());
  }
  for (int64_t i = 0; i < step.stop && EndsWith(token, step.content); ++i) {
    token.remove_suffix(step.content.size());
  }
  return std::string(token);
}

void DetokenizerStages::FeedStripFused(size_t index, std::string_view text,
                                       DetokenizerState* state,
                                       std::string* out) const {
  const Step& step = steps_[index];
  DetokenizerState::Stage& stage = state->stages[index];
  while (!stage.front_done && !text.empty()) {
    if (stage.num_stripped < step.start && StartsWith(text, step.content)) {
      text.remove_prefix(step.content.size());
      ++stage.num_stripped;
    } else {
      stage.front_done = true;
    }
  }
  if (text.empty()) return;
  if (step.stop == 0) return Feed(index + 1, text, state, out);
  // The latest characters that may have to be stripped, at most `stop`, are
  // held back, because the text may end after them.
  std::string all = std::exchange(stage.pending, std::string());
  all.append(text);
  std::string_view certain = all;
  for (int64_t i = 0; i < step.stop && EndsWith(certain, step.content); ++i) {
    certain.remove_suffix(step.content.size());
  }
  stage.pending = all.substr(certain.size());
  if (!certain.empty()) Feed(index + 1, certain, state, out);
}

void DetokenizerStages::FeedRun(size_t index, std::string_view certain,
                                DetokenizerState* state,
                                std::string* out) const {
  if (certain.empty()) return;
  bool& in_run = state->stages[index].in_run;
  Feed(index + 1, certain, state, out, std::exchange(in_run, true));
}

void DetokenizerStages::Feed(size_t index, std::string_view text,
                             DetokenizerState* state, std::string* out,
                             bool continues) const {
  DetokenizerState::Stage& stage = state->stages[index];
  if (!continues) ++stage.num_tokens;
  const int64_t position = stage.num_tokens - 1;
  if (index == steps_.size()) {
    if (joined_by_spaces_ && position > 0) out->push_back(' ');
    out->append(text);
    return;
  }
  const Step& step = steps_[index];
  switch (step.kind) {
    case Kind::kFuse:
      return Feed(index + 1, text, state, out);
    case Kind::kReplace:
      return Feed(index + 1, ReplaceIn(step, text), state, out, continues);
    case Kind::kStrip:
      return Feed(index + 1, StripToken(step, text), state, out);
    case Kind::kStripFused:
      return FeedStripFused(index, text, state, out);
    case Kind::kMetaspace: {
      const bool drop = step.drop_first && position == 0;
      return Feed(index + 1,
                  ReplaceLiteral(text, step.content, drop ? "" : " "), state,
                  out, continues);
    }
    case Kind::kByteLevel: {
      stage.pending.append(ByteLevelBytes(text));
      std::string certain;
      DrainUtf8(InvalidUnit::kSubsequence, &stage.pending, &certain);
      if (!certain.empty()) Feed(index + 1, certain, state, out);
      return;
    }
    case Kind::kByteFallback: {
      std::string certain;
      if (const auto byte = ByteOfToken(text)) {
        stage.pending.push_back(static_cast<char>(*byte));
        DrainUtf8(InvalidUnit::kByte, &stage.pending, &certain);
        return FeedRun(index, certain, state, out);
      }
      FinishUtf8(InvalidUnit::kByte, &stage.pending, &certain);
      FeedRun(index, certain, state, out);
      stage.in_run = false;
      return Feed(index + 1, text, state, out);
    }
  }
}

void DetokenizerStages::Finish(DetokenizerState* state,
                               std::string* out) const {
  for (size_t i = 0; i < steps_.size(); ++i) {
    std::string& pending = state->stages[i].pending;
    std::string certain;
    if (steps_[i].kind == Kind::kByteLevel) {
      FinishUtf8(InvalidUnit::kSubsequence, &pending, &certain);
    } else if (steps_[i].kind == Kind::kByteFallback) {
      FinishUtf8(InvalidUnit::kByte, &pending, &certain);
      FeedRun(i, certain, state, out);
      continue;
    } else if (steps_[i].kind == Kind::kStripFused) {
      pending.clear();  // drops the characters that are stripped at the end
    }
    if (!certain.empty()) Feed(i + 1, certain, state, out);
  }
}

std::string DetokenizerStages::BytesOf(std::string_view token) const {
  std::string text(token);
  for (const Step& step : steps_) {
    switch (step.kind) {
      case Kind::kByteLevel:
        return ByteLevelBytes(text);
      case Kind::kMetaspace:
        text = ReplaceLiteral(text, step.content, " ");
        break;
      case Kind::kReplace:
        text = ReplaceIn(step, text);
        break;
      case Kind::kByteFallback:
        if (const auto byte = ByteOfToken(text)) {
          return std::string(1, static_cast<char>(*byte));
        }
        break;
      case Kind::kFuse:
      case Kind::kStrip:
      case Kind::kStripFused:
        break;
    }
  }
  return text;
}

}  // namespace kvasir::model
