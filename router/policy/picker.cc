#include "router/policy/picker.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

namespace kvasir::router {
namespace {

// A slot whose replica was not seen for so many turns may be given away.
constexpr uint64_t kForgottenAfterTurns = 4096;
// Fewer requests than this are no load if all of them run: a batch of them
// takes hardly longer than one.
constexpr uint64_t kFewRequests = 4;
constexpr size_t kNoSlot = std::numeric_limits<size_t>::max();

uint64_t SeatsOf(const ReplicaView& replica) {
  return std::max<uint32_t>(replica.max_num_seqs, 1);
}

struct Choice {
  size_t index = 0;
  Load load;
  uint64_t requests = 0;
  bool has_room = false;
  size_t slot = kNoSlot;
};

}  // namespace

ReplicaPicker::ReplicaPicker(const PickerOptions& options)
    : options_(options) {}

std::vector<uint64_t> ReplicaPicker::KeysOf(const proto::TokenBytes& prompt,
                                            absl::string_view salt,
                                            const std::string& cache_id,
                                            uint32_t page_tokens) {
  std::vector<uint64_t> keys;
  if (options_.policy != PolicyKind::kPrefixAffinity || page_tokens == 0) {
    return keys;
  }
  const size_t pages =
      std::min(prompt.size_tokens() / page_tokens, kMaxKeyedPages);
  if (pages == 0) return keys;
  std::shared_ptr<const cache::PrefixHasher> hasher;
  {
    base::MutexLock lock(&mutex_);
    if (hasher_ == nullptr || cache_id_ != cache_id) {
      cache_id_ = cache_id;
      hasher_ = cache::MakePrefixHasher(cache_id);
    }
    hasher = hasher_;
  }
  keys.reserve(pages);
  std::vector<int32_t> page(page_tokens);
  cache::PrefixHash hash = hasher->Root(salt);
  for (size_t i = 0; i < pages; ++i) {
    for (size_t j = 0; j < page_tokens; ++j) {
      page[j] = prompt[i * page_tokens + j];
    }
    hash = hasher->Extend(hash, page);
    uint64_t key;
    std::memcpy(&key, hash.bytes.data(), sizeof(key));
    keys.push_back(key);
  }
  return keys;
}

std::optional<size_t> ReplicaPicker::Pick(
    absl::Span<const ReplicaView> replicas, const PolicyRequest& request) {
  base::MutexLock lock(&mutex_);
  const uint64_t turn = turn_++;
  if (options_.policy == PolicyKind::kPrefixAffinity &&
      (!request.pages.empty() || request.session != 0)) {
    return PickByPrefix(replicas, request);
  }
  return PickReplica(options_.policy, replicas, request, turn);
}

std::optional<size_t> ReplicaPicker::PickByPrefix(
    absl::Span<const ReplicaView> replicas, const PolicyRequest& request) {
  if (!prefixes_.has_value()) {
    prefixes_.emplace(options_.prefix_bytes, options_.seed);
  }
  uint64_t requests = 1;  // this one
  uint64_t seats = 0;
  bool any_has_room = false;
  std::vector<Choice> choices;
  choices.reserve(replicas.size());
  for (size_t i = 0; i < replicas.size(); ++i) {
    const ReplicaView& replica = replicas[i];
    if (!replica.eligible) continue;
    const Load load = LoadOf(replica, request);
    const bool has_room = load.would_wait == 0 || HasRoom(replica, request);
    choices.push_back({i, load, RequestsAt(replica), has_room});
    requests += choices.back().requests;
    seats += SeatsOf(replica);
    any_has_room = any_has_room || has_room;
  }
  if (choices.empty()) return std::nullopt;

  const double bound_per_seat = options_.load_factor *
                                static_cast<double>(requests) /
                                static_cast<double>(seats);
  const auto bound_of = [&](const Choice& choice) {
    return bound_per_seat *
           static_cast<double>(SeatsOf(replicas[choice.index]));
  };
  const uint64_t place =
      request.session != 0 ? request.session : request.pages[0];
  const auto rank_of = [&](const Choice& choice) {
    return MixBits(place, replicas[choice.index].name);
  };
  const auto precedes = [&](const Choice& a, const Choice& b) {
    if (request.session == 0 && a.load != b.load) return a.load < b.load;
    return rank_of(a) > rank_of(b);
  };
  Choice* best = nullptr;
  SlotSet among(slots_.size() / 64);
  for (Choice& choice : choices) {
    // An integer is below the bound if it is at most the bound, rounded up,
    // after this request has been added.
    const bool only_few = choice.requests < kFewRequests &&
                          choice.requests == replicas[choice.index].running;
    if (choice.has_room != any_has_room ||
        (!only_few &&
         static_cast<double>(choice.requests) >= bound_of(choice))) {
      continue;
    }
    if (best == nullptr || precedes(choice, *best)) best = &choice;
    choice.slot = SlotOf(choice.index, replicas[choice.index].incarnation);
    if (choice.slot == kNoSlot) continue;
    if (among.size() < slots_.size() / 64) among.resize(slots_.size() / 64);
    among[choice.slot / 64] |= uint64_t{1} << (choice.slot % 64);
  }
  // The replica with the smallest share of requests is within the first bound,
  // but it may have no room.
  if (best == nullptr) {
    return PickReplica(PolicyKind::kLeastLoaded, replicas, request, turn_);
  }
  if (request.session == 0) {
    Choice* const idle = best;
    const size_t first = turn_ % replicas.size();
    const PrefixMap::Hit hit = prefixes_->LongestHit(request.pages, among);
    // Equal holders of a common prefix take turns.
    const auto before_in_turn = [&](const Choice& a, const Choice& b) {
      if (a.load != b.load) return a.load < b.load;
      return std::pair(a.index < first, a.index) <
             std::pair(b.index < first, b.index);
    };
    size_t holders = 0;
    for (Choice& choice : choices) {
      if (hit.pages == 0) break;
      if (choice.slot == kNoSlot ||
          (hit.holders[choice.slot / 64] >> (choice.slot % 64) & 1) == 0) {
        continue;
      }
      if (holders == 0 || before_in_turn(choice, *best)) best = &choice;
      ++holders;
    }
    const double mean = bound_of(*idle) / options_.load_factor;
    if (holders > 1 &&
        options_.load_factor * static_cast<double>(idle->requests + 1) <=
            mean) {
      best = idle;
    }
  }
  if (best->slot != kNoSlot) prefixes_->Add(best->slot, request.pages);
  return best->index;
}

size_t ReplicaPicker::SlotOf(size_t index, uint64_t incarnation) {
  if (incarnation == 0) return kNoSlot;
  // In most turns the list has the same replicas as in the last one.
  if (index >= last_slots_.size()) last_slots_.resize(index + 1, 0);
  size_t slot = last_slots_[index];
  if (slot >= slots_.size() || slots_[slot].incarnation != incarnation) {
    const auto found = slot_of_.find(incarnation);
    if (found != slot_of_.end()) {
      slot = found->second;
    } else {
      if (free_slots_.empty() && turn_ >= no_slots_until_) AddSlots();
      if (free_slots_.empty()) return kNoSlot;
      slot = free_slots_.back();
      free_slots_.pop_back();
      slots_[slot].incarnation = incarnation;
      slot_of_.emplace(incarnation, slot);
    }
    last_slots_[index] = slot;
  }
  slots_[slot].last_seen = turn_;
  return slot;
}

void ReplicaPicker::AddSlots() {
  SlotSet forgotten(slots_.size() / 64);
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].last_seen + kForgottenAfterTurns > turn_) continue;
    forgotten[i / 64] |= uint64_t{1} << (i % 64);
    slot_of_.erase(slots_[i].incarnation);
    slots_[i] = {};
    free_slots_.push_back(i);
  }
  if (!free_slots_.empty()) {
    prefixes_->Forget(forgotten);
  } else if (slots_.size() < PrefixMap::kMaxSlots) {
    for (size_t i = 0; i < 64; ++i) free_slots_.push_back(slots_.size() + i);
    slots_.resize(slots_.size() + 64);
  } else {
    no_slots_until_ = turn_ + kForgottenAfterTurns / 4;
  }
}

}  // namespace kvasir::router
