// The byte-pair model: turns one pre-tokenized piece into ids.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "model/tokenizer/tokenizer_json.h"

namespace kvasir::model {

// Owns: vocabulary and merges.
// Threads: Encode from any number of threads, each with its own scratch.
class BpeModel {
 public:
  // Buffers of one encoding thread, kept between pieces.
  struct Scratch {
    struct Symbol {
      int32_t id = 0;
      int32_t previous = -1;
      int32_t next = -1;
      bool alive = true;
    };
    struct Candidate {
      int32_t rank = 0;
      int32_t position = 0;  // index of the left symbol
      int32_t merged = 0;
    };
    std::vector<Symbol> symbols;
    std::vector<Candidate> heap;
    std::vector<int32_t> ids;
    std::string mapped;
    // The first character that Encode left out because the file's unk_token is
    // not in the vocabulary. Encode never clears it.
    std::string uncovered;
  };

  // `ref` is the file's "model" object. If `byte_level` is true, pieces are raw
  // bytes. The largest allowed id depends on the size of the vocabulary and on
  // `num_added`, the number of added tokens.
  static absl::StatusOr<std::unique_ptr<BpeModel>> FromJson(const JsonRef& ref,
                                                            bool byte_level,
                                                            size_t num_added);
  BpeModel(const BpeModel&) = delete;
  BpeModel& operator=(const BpeModel&) = delete;

  // Appends the ids of one piece. Characters that no token covers become byte
  // tokens, the unknown token, or nothing, as the file says. If the file names
  // an unknown token that the vocabulary lacks, they are left out and
  // `scratch->uncovered` is set. O(n log n).
  void Encode(std::string_view piece, Scratch* scratch,
              std::vector<int32_t>* ids) const;

  // The most bytes of a piece that one id can stand for. 0: no limit, because
  // unknown characters are dropped or share one id.
  size_t longest_token_bytes() const;

  // The texts of the tokens, indexed by id. A text is empty if no token, or the
  // empty token, has the id.
  const std::vector<std::string>& tokens() const { return tokens_; }
  // True if a token, which may be the empty one, has this id.
  bool HasId(size_t id) const;
  // The id of the vocabulary's empty token (Whisper has one). Encode never
  // returns it.
  std::optional<int32_t> empty_id() const { return empty_id_; }
  // The number of tokens that the vocabulary lists.
  size_t num_tokens() const { return num_tokens_; }
  // Returns the error for a text for which Encode set `scratch.uncovered`.
  absl::Status Uncovered(const Scratch& scratch) const;
  std::optional<int32_t> Find(std::string_view token) const;

 private:
  struct Merge {
    int32_t rank = 0;
    int32_t merged = 0;
  };
  // A piece may equal the text of a token. Then the merges may give this token
  // (kIsToken) or several others (kIsMerged). This is determined when such a
  // piece first occurs; before that, it is kUntried.
  enum WholeWord : uint8_t { kUntried, kIsToken, kIsMerged };

  BpeModel() = default;
  absl::Status ReadOptions(const JsonRef& ref);
  absl::Status ReadVocabulary(const JsonRef& ref, size_t num_added);
  absl::Status ReadMerges(const JsonRef& ref);
  absl::Status AddMerge(const std::string& path, std::string_view left,
                        std::string_view right, int32_t rank);
  void IndexBytes();

  void AppendSymbols(std::string_view piece, Scratch* scratch) const;
  bool AppendFallback(std::string_view character,
                      std::vector<int32_t>* ids) const;
  void AppendRawBytes(std::string_view piece, std::vector<int32_t>* ids) const;
  // Runs the merges over scratch->ids, in place.
  void MergeAll(Scratch* scratch) const;
  void MergeFew(std::vector<int32_t>* ids) const;
  const Merge* FindMerge(int32_t left, int32_t right) const;

  bool byte_level_ = false;
  bool ignore_merges_ = false;
  bool fuse_unknown_ = false;
  std::optional<int32_t> unknown_;
  // The file's unk_token, if the vocabulary does not have it.
  std::optional<std::string> missing_unknown_;
  // The ids of the tokens <0x00> to <0xFF>, or -1. Empty if the file does not
  // use them for characters that no token covers.
  std::vector<int32_t> fallback_;

  std::vector<std::string> tokens_;
  std::optional<int32_t> empty_id_;
  size_t num_tokens_ = 0;
  // Keys point into tokens_.
  absl::flat_hash_map<absl::string_view, int32_t> ids_;
  absl::flat_hash_map<uint64_t, Merge> merges_;

  // Used only if byte_level_. byte_ids_[b] is the id of the token for the
  // single byte b, or -1. all_bytes_: no entry is -1.
  std::array<int32_t, 256> byte_ids_{};
  bool all_bytes_ = false;
  // The texts of the tokens in the form in which pieces contain them: raw bytes
  // if byte_level_.
  std::vector<std::string> word_texts_;
  absl::flat_hash_map<absl::string_view, int32_t> words_;
  mutable std::vector<std::atomic<uint8_t>> whole_words_;  // by id
};

}  // namespace kvasir::model
