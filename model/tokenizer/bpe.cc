#include "model/tokenizer/bpe.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "base/string_view.h"
#include "model/tokenizer/utf8.h"

namespace kvasir::model {
namespace {

using base::AbslView;

uint64_t PairKey(int32_t left, int32_t right) {
  return (uint64_t{static_cast<uint32_t>(left)} << 32) |
         static_cast<uint32_t>(right);
}

// For at most this many symbols, searching all pairs for the best one is faster
// than a heap.
constexpr size_t kFewSymbols = 16;

}  // namespace

absl::StatusOr<std::unique_ptr<BpeModel>> BpeModel::FromJson(const JsonRef& ref,
                                                             bool byte_level,
                                                             size_t num_added) {
  std::unique_ptr<BpeModel> model(new BpeModel);
  model->byte_level_ = byte_level;
  KVASIR_RETURN_IF_ERROR(model->ReadVocabulary(ref, num_added));
  KVASIR_RETURN_IF_ERROR(model->ReadOptions(ref));
  KVASIR_RETURN_IF_ERROR(model->ReadMerges(ref));
  model->IndexBytes();
  return model;
}

absl::Status BpeModel::ReadOptions(const JsonRef& ref) {
  KVASIR_ASSIGN_OR_RETURN(const auto type, ref.Find("type"));
  if (type) {
    KVASIR_ASSIGN_OR_RETURN(const std::string name, type->String());
    if (name != "BPE") return type->Unsupported("BPE");
  }
  KVASIR_ASSIGN_OR_RETURN(const auto dropout, ref.Find("dropout"));
  if (dropout && dropout->value() != 0.0) return dropout->Unsupported("null");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    KVASIR_ASSIGN_OR_RETURN(const auto affix, ref.Find(key));
    if (affix && affix->value() != "") return affix->Unsupported("null");
  }
  KVASIR_ASSIGN_OR_RETURN(fuse_unknown_, ref.GetBool("fuse_unk", false));
  KVASIR_ASSIGN_OR_RETURN(ignore_merges_, ref.GetBool("ignore_merges", false));
  KVASIR_ASSIGN_OR_RETURN(const auto unknown, ref.Find("unk_token"));
  if (unknown) {
    KVASIR_ASSIGN_OR_RETURN(const std::string token, unknown->String());
    unknown_ = token.empty() ? empty_id_ : Find(token);
    if (!unknown_) missing_unknown_ = token;
  }
  KVASIR_ASSIGN_OR_RETURN(const bool fall_back,
                          ref.GetBool("byte_fallback", false));
  if (!fall_back) return absl::OkStatus();
  for (int byte = 0; byte < 256; ++byte) {
    fallback_.push_back(Find(absl::StrFormat("<0x%02X>", byte)).value_or(-1));
  }
  return absl::OkStatus();
}

absl::Status BpeModel::ReadVocabulary(const JsonRef& ref, size_t num_added) {
  KVASIR_ASSIGN_OR_RETURN(const JsonRef vocab, ref.Get("vocab"));
  if (!vocab.value().is_object()) return vocab.Invalid("an object");
  const auto& entries = vocab.value();
  const auto limit =
      static_cast<int64_t>(entries.size() + num_added + kMaxUnusedIds);
  for (const auto& [token, id] : entries.items()) {
    if (!id.is_number_integer() || id.get<int64_t>() < 0 ||
        id.get<int64_t>() >= limit) {
      return JsonRef(id, absl::StrCat(vocab.path(), "[\"", token, "\"]"))
          .Invalid(absl::StrCat("an integer from 0 to ", limit - 1));
    }
    const auto index = static_cast<size_t>(id.get<int64_t>());
    if (index >= tokens_.size()) tokens_.resize(index + 1);
    if (HasId(index)) {
      return absl::InvalidArgumentError(absl::StrCat(
          vocab.path(), "[\"", token, "\"] is ", index,
          ", but that is also the id of [\"", tokens_[index], "\"]"));
    }
    tokens_[index] = token;
    if (token.empty()) empty_id_ = static_cast<int32_t>(index);
  }
  num_tokens_ = entries.size();
  ids_.reserve(entries.size());
  for (size_t i = 0; i < tokens_.size(); ++i) {
    if (!tokens_[i].empty()) ids_.emplace(tokens_[i], static_cast<int32_t>(i));
  }
  return absl::OkStatus();
}

absl::Status BpeModel::AddMerge(const std::string& path, std::string_view left,
                                std::string_view right, int32_t rank) {
  const auto left_id = Find(left);
  const auto right_id = Find(right);
  const auto merged = Find(absl::StrCat(AbslView(left), AbslView(right)));
  if (!left_id || !right_id || !merged) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, "[", rank, "] merges \"", AbslView(left),
                     "\" and \"", AbslView(right), "\": ",
                     !left_id    ? "the first"
                     : !right_id ? "the second"
                                 : "the result",
                     " is not in the vocabulary"));
  }
  // If the file lists a merge twice, the later entry is used, as in Hugging
  // Face tokenizers.
  merges_[PairKey(*left_id, *right_id)] = {rank, *merged};
  return absl::OkStatus();
}

absl::Status BpeModel::ReadMerges(const JsonRef& ref) {
  KVASIR_ASSIGN_OR_RETURN(const JsonRef merges, ref.Get("merges"));
  if (!merges.value().is_array()) return merges.Invalid("an array");
  merges_.reserve(merges.value().size());
  int32_t rank = 0;
  for (const auto& entry : merges.value()) {
    std::string_view left;
    std::string_view right;
    if (entry.is_string()) {
      const std::string_view both = entry.get_ref<const std::string&>();
      // This is the first line of a merges.txt, which is not a merge.
      if (both.starts_with("#version")) {
        ++rank;
        continue;
      }
      const size_t space = both.find(' ');
      if (space != std::string_view::npos &&
          both.find(' ', space + 1) == std::string_view::npos) {
        left = both.substr(0, space);
        right = both.substr(space + 1);
      }
    } else if (entry.is_array() && entry.size() == 2 && entry[0].is_string() &&
               entry[1].is_string()) {
      left = entry[0].get_ref<const std::string&>();
      right = entry[1].get_ref<const std::string&>();
    }
    if (left.empty() || right.empty()) {
      return JsonRef(entry, absl::StrCat(merges.path(), "[", rank, "]"))
          .Invalid("\"a b\" or [\"a\", \"b\"]");
    }
    KVASIR_RETURN_IF_ERROR(AddMerge(merges.path(), left, right, rank));
    ++rank;
  }
  return absl::OkStatus();
}

void BpeModel::IndexBytes() {
  whole_words_ = std::vector<std::atomic<uint8_t>>(tokens_.size());
  if (!byte_level_) {
    words_ = ids_;
    return;
  }
  std::string character;
  all_bytes_ = true;
  for (size_t byte = 0; byte < 256; ++byte) {
    character.clear();
    AppendUtf8(ByteAlphabet()[byte], &character);
    byte_ids_[byte] = Find(character).value_or(-1);
    all_bytes_ = all_bytes_ && byte_ids_[byte] >= 0;
  }
  word_texts_.resize(tokens_.size());
  words_.reserve(tokens_.size());
  for (size_t i = 0; i < tokens_.size(); ++i) {
    auto bytes = BytesOfByteLevel(tokens_[i]);
    if (!bytes || bytes->empty()) continue;
    word_texts_[i] = *std::move(bytes);
    words_.emplace(word_texts_[i], static_cast<int32_t>(i));
  }
}

std::optional<int32_t> BpeModel::Find(std::string_view token) const {
  const auto it = ids_.find(AbslView(token));
  if (it == ids_.end()) return std::nullopt;
  return it->second;
}

bool BpeModel::HasId(size_t id) const {
  return id < tokens_.size() &&
         (!tokens_[id].empty() || static_cast<int64_t>(id) == empty_id_);
}

absl::Status BpeModel::Uncovered(const Scratch& scratch) const {
  return absl::InvalidArgumentError(
      absl::StrCat("no token covers the character \"", scratch.uncovered,
                   "\", and the tokenizer's unk_token \"", *missing_unknown_,
                   "\" is not in its vocabulary"));
}

const BpeModel::Merge* BpeModel::FindMerge(int32_t left, int32_t right) const {
  const auto it = merges_.find(PairKey(left, right));
  return it == merges_.end() ? nullptr : &it->second;
}

void BpeModel::Encode(std::string_view piece, Scratch* scratch,
                      std::vector<int32_t>* ids) const {
  if (piece.empty()) return;
  const auto word = words_.find(AbslView(piece));
  std::atomic<uint8_t>* state = nullptr;
  if (word != words_.end()) {
    state = &whole_words_[static_cast<size_t>(word->second)];
    if (ignore_merges_ || state->load(std::memory_order_relaxed) == kIsToken) {
      ids->push_back(word->second);
      return;
    }
  }
  scratch->ids.clear();
  AppendSymbols(piece, scratch);
  if (scratch->ids.size() <= kFewSymbols) {
    MergeFew(&scratch->ids);
  } else {
    MergeAll(scratch);
  }
  if (state) {
    const bool same =
        scratch->ids.size() == 1 && scratch->ids[0] == word->second;
    state->store(same ? kIsToken : kIsMerged, std::memory_order_relaxed);
  }
  ids->insert(ids->end(), scratch->ids.begin(), scratch->ids.end());
}

void BpeModel::AppendSymbols(std::string_view piece, Scratch* scratch) const {
  std::vector<int32_t>& ids = scratch->ids;
  std::string_view text = piece;
  if (byte_level_) {
    if (all_bytes_) {
      AppendRawBytes(piece, &ids);
      return;
    }
    scratch->mapped.clear();
    AppendByteLevel(piece, &scratch->mapped);
    text = scratch->mapped;
  }
  bool unknown_waits = false;
  const auto flush_unknown = [&] {
    if (std::exchange(unknown_waits, false)) ids.push_back(*unknown_);
  };
  while (!text.empty()) {
    const size_t size = FirstChar(text).size;
    const std::string_view character = text.substr(0, size);
    text.remove_prefix(size);
    if (const auto id = Find(character)) {
      flush_unknown();
      ids.push_back(*id);
    } else if (AppendFallback(character, &ids)) {
      // As in Hugging Face tokenizers, a pending unknown token is not appended
      // before byte tokens.
    } else if (missing_unknown_) {
      if (scratch->uncovered.empty()) scratch->uncovered = character;
    } else if (unknown_) {
      if (!fuse_unknown_) flush_unknown();
      unknown_waits = true;
    }
  }
  flush_unknown();
}

bool BpeModel::AppendFallback(std::string_view character,
                              std::vector<int32_t>* ids) const {
  if (fallback_.empty()) return false;
  for (const char byte : character) {
    if (fallback_[static_cast<uint8_t>(byte)] < 0) return false;
  }
  for (const char byte : character) {
    ids->push_back(fallback_[static_cast<uint8_t>(byte)]);
  }
  return true;
}

void BpeModel::AppendRawBytes(std::string_view piece,
                              std::vector<int32_t>* ids) const {
  for (const char byte : piece) {
    ids->push_back(byte_ids_[static_cast<uint8_t>(byte)]);
  }
}

void BpeModel::MergeFew(std::vector<int32_t>* ids) const {
  // pairs[i] is the merge of symbols i and i + 1.
  std::array<Merge, kFewSymbols> pairs;
  constexpr int32_t kNone = INT32_MAX;
  const auto look_up = [&](size_t i) {
    const Merge* merge = FindMerge((*ids)[i], (*ids)[i + 1]);
    pairs[i] = merge ? *merge : Merge{kNone, 0};
  };
  for (size_t i = 0; i + 1 < ids->size(); ++i) look_up(i);
  while (ids->size() > 1) {
    const size_t num_pairs = ids->size() - 1;
    size_t best = 0;
    for (size_t i = 1; i < num_pairs; ++i) {
      if (pairs[i].rank < pairs[best].rank) best = i;
    }
    if (pairs[best].rank == kNone) return;
    (*ids)[best] = pairs[best].merged;
    ids->erase(ids->begin() + static_cast<ptrdiff_t>(best) + 1);
    std::copy(pairs.begin() + static_cast<ptrdiff_t>(best) + 1,
              pairs.begin() + static_cast<ptrdiff_t>(num_pairs),
              pairs.begin() + static_cast<ptrdiff_t>(best));
    if (best + 1 < ids->size()) look_up(best);
    if (best > 0) look_up(best - 1);
  }
}

void BpeModel::MergeAll(Scratch* scratch) const {
  auto& symbols = scratch->symbols;
  auto& heap = scratch->heap;
  symbols.clear();
  heap.clear();
  const auto size = static_cast<int32_t>(scratch->ids.size());
  for (int32_t i = 0; i < size; ++i) {
    symbols.push_back({.id = scratch->ids[static_cast<size_t>(i)],
                       .previous = i - 1,
                       .next = i + 1 < size ? i + 1 : -1});
  }
  // The next merge is the one with the lowest rank, and among equal ranks the
  // leftmost one. The comparison is inverted, because the standard heap
  // functions put the greatest element in front.
  const auto later = [](const Scratch::Candidate& a,
                        const Scratch::Candidate& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.position > b.position;
  };
  const auto at = [&](int32_t i) -> Scratch::Symbol& {
    return symbols[static_cast<size_t>(i)];
  };
  const auto consider = [&](int32_t left) {
    if (left < 0 || at(left).next < 0) return false;
    const Merge* merge = FindMerge(at(left).id, at(at(left).next).id);
    if (!merge) return false;
    heap.push_back({merge->rank, left, merge->merged});
    return true;
  };
  for (int32_t i = 0; i < size; ++i) consider(i);
  std::make_heap(heap.begin(), heap.end(), later);
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), later);
    const Scratch::Candidate top = heap.back();
    heap.pop_back();
    Scratch::Symbol& left = at(top.position);
    if (!left.alive || left.next < 0) continue;
    Scratch::Symbol& right = at(left.next);
    // Another merge may have changed the pair since the pair was put into
    // the heap.
    const Merge* merge = FindMerge(left.id, right.id);
    if (!merge || merge->merged != top.merged) continue;
    left.id = top.merged;
    right.alive = false;
    left.next = right.next;
    if (right.next >= 0) at(right.next).previous = top.position;
    if (consider(left.previous))
      std::push_heap(heap.begin(), heap.end(), later);
    if (consider(top.position)) std::push_heap(heap.begin(), heap.end(), later);
  }
  scratch->ids.clear();
  for (int32_t i = size > 0 ? 0 : -1; i >= 0; i = at(i).next) {
    scratch->ids.push_back(at(i).id);
  }
}

size_t BpeModel::longest_token_bytes() const {
  const bool covers_all =
      byte_level_
          ? all_bytes_
          : !fallback_.empty() && std::find(fallback_.begin(), fallback_.end(),
                                            -1) == fallback_.end();
  if (!covers_all) {
    if (!unknown_ || fuse_unknown_) return 0;
    // If the unknown token is part of a merge, one id can stand for any number
    // of characters.
    for (const auto& [pair, merge] : merges_) {
      if (static_cast<int32_t>(pair >> 32) == *unknown_ ||
          static_cast<int32_t>(pair & 0xFFFFFFFF) == *unknown_) {
        return 0;
      }
    }
  }
  size_t longest = 4;  // the longest unknown character
  for (const std::string& token : tokens_) {
    longest = std::max(longest, token.size());
  }
  return longest;
}

}  // namespace kvasir::model
