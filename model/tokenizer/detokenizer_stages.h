// The "decoder" of a tokenizer file: tokens to text, as a stream.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "model/tokenizer/text_pattern.h"
#include "model/tokenizer/tokenizer_json.h"
#include "model/tokenizer/utf8.h"

namespace kvasir::model {

// Where one decoding stands; belongs to one text.
struct DetokenizerState {
  struct Stage {
    int64_t num_tokens = 0;    // seen by this stage
    int64_t num_stripped = 0;  // characters taken off the front
    bool front_done = false;   // something else than those came by
    std::string pending;       // bytes or characters that wait
  };
  std::vector<Stage> stages;
};

// A chain of stages. Up to the first that joins (ByteLevel, Fuse) a stage sees
// whole tokens, behind it fragments of one text.
//
// Where a run of byte tokens mixes characters with bytes that form none, the
// characters stay and each other byte becomes U+FFFD: a character is certain
// as soon as it is complete, whatever follows.
//
// Threads: immutable; a DetokenizerState belongs to one thread.
class DetokenizerStages {
 public:
  // The file names none: tokens are joined by spaces.
  DetokenizerStages() = default;
  // Unimplemented names a component, or an order of them, we do not have.
  static absl::StatusOr<DetokenizerStages> FromJson(const JsonRef& ref);

  DetokenizerState NewState() const;
  // Appends what became certain with `token`.
  void Push(std::string_view token, DetokenizerState* state,
            std::string* out) const;
  // Appends what was waiting; the state is spent.
  void Finish(DetokenizerState* state, std::string* out) const;

  // One token's own bytes, without what stages do at the ends of a text.
  std::string BytesOf(std::string_view token) const;

 private:
  enum class Kind {
    kByteLevel,
    kMetaspace,
    kReplace,
    kByteFallback,
    kFuse,
    kStrip,       // each token
    kStripFused,  // the text
  };
  struct Step {
    Kind kind = Kind::kFuse;
    std::vector<TextPattern> pattern;  // kReplace: one
    std::string content;               // kReplace; kStrip*, kMetaspace: a char
    bool drop_first = false;           // kMetaspace
    int64_t start = 0;                 // kStrip*: characters
    int64_t stop = 0;
  };

  static absl::StatusOr<Step> ReadStep(const std::string& type,
                                       const JsonRef& ref);
  absl::Status CheckOrder(const Step& step, const JsonRef& ref) const;

  // Passes `text` through stage `index` and those behind it.
  void Feed(size_t index, std::string_view text, DetokenizerState* state,
            std::string* out) const;
  void FeedStripFused(size_t index, std::string_view text,
                      DetokenizerState* state, std::string* out) const;
  static std::string StripToken(const Step& step, std::string_view token);
  static std::string ReplaceIn(const Step& step, std::string_view token);

  std::vector<Step> steps_;
  bool joined_by_spaces_ = true;
};

}  // namespace kvasir::model
