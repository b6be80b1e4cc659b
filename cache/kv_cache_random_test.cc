// Runs random operations on KvCache and checks its invariants after each one. A
// simulated executor writes slots, so that the test notices if a sequence does
// not read what its own tokens wrote.
#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "cache/eviction/eviction_schedule.h"
#include "cache/kv_cache.h"

namespace kvasir::cache {
namespace {

constexpr int64_t kPageTokens = 4;
constexpr size_t kMostLive = 32;

// A hasher with only two bits, so that collisions are frequent.
class WeakHasher final : public PrefixHasher {
 public:
  PrefixHash Root(absl::string_view salt) const override {
    return Name(salt.size());
  }
  PrefixHash Extend(const PrefixHash& parent,
                    absl::Span<const int32_t> token_ids) const override {
    size_t sum = parent.bytes[0];
    for (int32_t id : token_ids) sum = sum * 31 + static_cast<size_t>(id);
    return Name(sum >> 1);
  }

 private:
  static PrefixHash Name(size_t value) {
    PrefixHash hash;
    hash.bytes[0] = static_cast<uint8_t>(value & 3);
    return hash;
  }
};

// Simulates the executor's memory: applies block table deltas and page copies.
// The content of a slot is the hash of all tokens up to it. Side pages hold a
// ring of the latest slots. So a copy that is made a step too early or too late
// has another content. An eviction chooses the slots that stay by their
// contents. So if slots are wrong or in the wrong order, other slots stay.
class SlotModel {
 public:
  explicit SlotModel(const KvCacheConfig& config) : config_(config) {
    for (const KvCacheConfig::Group& group : config.groups) {
      slots_.emplace_back(static_cast<size_t>(group.num_pages * kPageTokens),
                          0);
      host_slots_.emplace_back(
          static_cast<size_t>(group.num_host_pages * kPageTokens), 0);
    }
  }

  void Copy(const kvasir::v1::PageCopy& copy) {
    const auto& from = (copy.from_host() ? host_slots_ : slots_);
    auto& to = (copy.to_host() ? host_slots_ : slots_);
    for (int64_t s = 0; s < kPageTokens; ++s) {
      to[copy.page_group()].at(Slot(copy.to_page(), s)) =
          from[copy.page_group()].at(Slot(copy.from_page(), s));
    }
  }

  void Evict(const kvasir::v1::SlotEviction& eviction) {
    std::vector<uint64_t>& slots = slots_[eviction.page_group()];
    const auto at = [&](uint64_t slot) -> uint64_t& {
      const auto page = static_cast<int>(slot / kPageTokens);
      return slots.at(
          Slot(eviction.pages(page), static_cast<int64_t>(slot % kPageTokens)));
    };
    std::vector<uint64_t> held;
    for (uint64_t s = 0; s < eviction.num_slots(); ++s) held.push_back(at(s));
    const std::vector<uint64_t> kept =
        Kept(std::move(held), eviction.kept_slots());
    for (uint64_t s = 0; s < kept.size(); ++s) at(s) = kept[s];
    const auto table = tables_.find(
        {static_cast<int64_t>(eviction.sequence_id()), eviction.page_group()});
    if (table == tables_.end()) return;
    table->second.pages.resize((kept.size() + kPageTokens - 1) /
                               static_cast<size_t>(kPageTokens));
  }

  // Returns the `kept` largest contents of `held`, in unchanged order.
  static std::vector<uint64_t> Kept(std::vector<uint64_t> held, size_t kept) {
    while (held.size() > kept) {
      held.erase(std::min_element(held.begin(), held.end()));
    }
    return held;
  }

  void Apply(SequenceId id, const kvasir::v1::BlockTableDelta& delta) {
    Table& table = tables_[{id.value(), delta.page_group()}];
    if (delta.reset()) {
      table = Table();
      table.side_pages.assign(delta.side_pages().begin(),
                              delta.side_pages().end());
    }
    for (int32_t page : delta.appended_pages()) table.pages.push_back(page);
    table.first_live = delta.first_live_index();
  }

  void Drop(SequenceId id) {
    std::erase_if(tables_, [id](const auto& entry) {
      return entry.first.first == id.value();
    });
  }

  void Write(SequenceId id, uint32_t group, int64_t position, uint64_t value) {
    *At(id, group, position) = value;
  }
  uint64_t Read(SequenceId id, uint32_t group, int64_t position) {
    return *At(id, group, position);
  }
  int64_t RingRows(uint32_t group) const {
    return config_.groups[group].side_pages_per_sequence * kPageTokens;
  }
  uint64_t* InRing(SequenceId id, uint32_t group, int64_t position) {
    const std::vector<int32_t>& pages =
        tables_.at({id.value(), group}).side_pages;
    const auto index = static_cast<size_t>(position / kPageTokens);
    return &slots_[group].at(
        Slot(pages.at(index % pages.size()), position % kPageTokens));
  }

 private:
  struct Table {
    std::vector<int32_t> pages;
    uint32_t first_live = 0;
    std::vector<int32_t> side_pages;
  };

  static size_t Slot(int32_t page, int64_t slot) {
    return static_cast<size_t>(page * kPageTokens + slot);
  }
  uint64_t* At(SequenceId id, uint32_t group, int64_t position) {
    const Table& table = tables_.at({id.value(), group});
    const auto index = static_cast<size_t>(position / kPageTokens);
    EXPECT_GE(index, table.first_live);
    return &slots_[group].at(
        Slot(table.pages.at(index), position % kPageTokens));
  }

  const KvCacheConfig config_;
  std::vector<std::vector<uint64_t>> slots_;
  std::vector<std::vector<uint64_t>> host_slots_;
  std::map<std::pair<int64_t, uint32_t>, Table> tables_;
};

struct Options {
  uint64_t seed = 0;
  bool weak_hash = false;
  KvCacheConfig config;
};

class RandomRun {
 public:
  explicit RandomRun(const Options& options)
      : options_(options),
        random_(options.seed),
        model_(options.config),
        cache_(options.config,
               options.weak_hash ? std::make_unique<WeakHasher>() : nullptr) {}

  void Run(int steps) {
    for (int i = 0; i < steps && !::testing::Test::HasFailure(); ++i) {
      SCOPED_TRACE(absl::StrCat("seed ", options_.seed, " operation ", i));
      Operation();
      Check();
    }
    while (!live_.empty()) End(live_.begin()->first, &KvCache::Release);
    images_.clear();
    Check();
    const KvCacheStats stats = cache_.Stats();
    EXPECT_EQ(stats.leaked_pages, 0);
    for (const PageGroupStats& group : stats.groups) {
      EXPECT_EQ(group.free_pages, group.num_pages);
      EXPECT_EQ(group.filled_slots, 0);
      EXPECT_EQ(group.host_used_pages, 0);
    }
    cache_.DropPrefixCache();
    Check();
    for (const PageGroupStats& group : cache_.Stats().groups) {
      EXPECT_EQ(group.cached_pages, 0);
    }
  }

  KvCacheStats stats() const { return cache_.Stats(); }

 private:
  struct Live {
    std::vector<int32_t> tokens;
    int64_t committed = 0;
    int64_t prompt = 0;
    // For each group that evicts: the contents that the sequence's slots must
    // have.
    std::map<uint32_t, std::vector<uint64_t>> held;
  };

  int64_t Below(int64_t limit) {
    return std::uniform_int_distribution<int64_t>(0, limit - 1)(random_);
  }
  int64_t AnyLive() {
    auto it = live_.begin();
    std::advance(it, Below(static_cast<int64_t>(live_.size())));
    return it->first;
  }

  void Operation() {
    // Ends a sequence if there are too many, so that the number of sequences
    // stays bounded in a long run.
    if (live_.size() > kMostLive) End(live_.begin()->first, &KvCache::Release);
    const int64_t choice = Below(100);
    if (live_.empty() || choice < 15) {
      Start();
    } else if (choice < 85) {
      Step();
    } else if (choice < 90) {
      Fork();
    } else if (choice < 95) {
      End(AnyLive(), &KvCache::Release);
    } else if (choice < 97) {
      Restart();
    } else if (choice < 99) {
      Import();
    } else {
      cache_.DropPrefixCache();
    }
  }

  void Start() {
    // Draws from few different prompts, so that sequences share prefixes.
    std::vector<int32_t> tokens(static_cast<size_t>(1 + Below(30)));
    const auto kind = static_cast<int32_t>(Below(3));
    for (size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = Below(40) == 0 ? 7 : kind + static_cast<int32_t>(i % 5);
    }
    const auto prompt = static_cast<int64_t>(tokens.size());
    Start(std::move(tokens), prompt);
  }

  void Start(std::vector<int32_t> tokens, int64_t prompt) {
    StartOptions options;
    options.prompt_tokens = prompt;
    options.salt = Below(5) == 0 ? "other" : "";
    options.reuse_prefix = Below(8) != 0;
    options.publish_prefix = Below(8) != 0;
    const SequenceId id(next_id_++);
    const int64_t probed = cache_.CachedPrefixTokens(tokens, options);
    const StartResult started = cache_.StartSequence(id, tokens, options);
    EXPECT_EQ(started.cached_tokens, probed);
    EXPECT_LT(started.cached_tokens, static_cast<int64_t>(tokens.size()));
    EXPECT_EQ(started.cached_tokens % kPageTokens, 0);
    live_[id.value()] = {std::move(tokens), started.cached_tokens, prompt, {}};
    for (uint32_t g = 0; g < options_.config.groups.size(); ++g) {
      if (Evicts(g)) live_[id.value()].held[g];
    }
  }

  bool Evicts(uint32_t group) const {
    return options_.config.groups[group].eviction.evicts();
  }

  void Evict(int64_t id) {
    Live& live = live_[id];
    cache_.Evict(SequenceId(id));
    for (auto& [group, held] : live.held) {
      const EvictionSchedule schedule(options_.config.groups[group].eviction,
                                      live.prompt);
      if (!schedule.IsPoint(live.committed)) continue;
      held = SlotModel::Kept(std::move(held),
                             static_cast<size_t>(schedule.kept_slots()));
    }
    Check();
  }

  // Runs one step of a random batch: all its sequences reserve, then all deltas
  // and copies are taken, then all sequences write and commit.
  void Step() {
    std::map<int64_t, int64_t> batch;
    for (auto& [id, live] : live_) {
      if (Below(2) == 0) continue;
      if (live.committed == static_cast<int64_t>(live.tokens.size())) {
        live.tokens.push_back(static_cast<int32_t>(Below(4)));
      }
      const int64_t left =
          static_cast<int64_t>(live.tokens.size()) - live.committed;
      if (cache_.eviction_due(SequenceId(id))) Evict(id);
      int64_t count = 1 + Below(left);
      if (const auto next = cache_.next_eviction(SequenceId(id))) {
        count = std::min(count, *next - live.committed);
      }
      const int64_t cut = cache_.tail_cut(SequenceId(id));
      if (cut > live.committed && Below(2) == 0) {
        count = std::min(count, cut - live.committed);
      }
      if (cache_.Reserve(SequenceId(id), count)) batch[id] = count;
      Check();
    }
    // Sometimes a sequence has a reservation but does not run in this step,
    // because it is preempted or postponed.
    if (!batch.empty() && Below(4) == 0) {
      const int64_t victim = batch.begin()->first;
      batch.erase(victim);
      if (Below(2) == 0) End(victim, &KvCache::Preempt);
      Check();
    }
    // Other sequences are exported and imported before the step's copies are
    // taken.
    for (int64_t n = Below(3); n > 0 && HasHostPool() && !live_.empty(); --n) {
      const int64_t id = AnyLive();
      if (!batch.contains(id)) Export(id);
      if (Below(2) == 0) Import();
      Check();
    }
    google::protobuf::RepeatedPtrField<kvasir::v1::PageCopy> copies;
    cache_.TakePageCopies(&copies);
    google::protobuf::RepeatedPtrField<kvasir::v1::SlotEviction> evictions;
    cache_.TakeEvictions(&evictions);
    int next_eviction = 0;
    for (int done = 0; done <= copies.size(); ++done) {
      for (; next_eviction < evictions.size() &&
             static_cast<int>(evictions[next_eviction].after_page_copies()) ==
                 done;
           ++next_eviction) {
        model_.Evict(evictions[next_eviction]);
      }
      if (done < copies.size()) model_.Copy(copies[done]);
    }
    EXPECT_EQ(next_eviction, evictions.size());
    for (const auto& [id, count] : batch) {
      kvasir::v1::SequenceStep step;
      cache_.TakeDeltas(SequenceId(id), &step);
      for (const auto& delta : step.block_tables()) {
        model_.Apply(SequenceId(id), delta);
      }
    }
    for (const auto& [id, count] : batch) ReadRings(id);
    for (const auto& [id, count] : batch) Write(id, count);
    for (const auto& [id, count] : batch) ReadBack(id);
    for (const auto& [id, count] : batch) {
      Live& live = live_[id];
      cache_.Commit(SequenceId(id),
                    absl::MakeConstSpan(live.tokens)
                        .subspan(static_cast<size_t>(live.committed),
                                 static_cast<size_t>(count)));
      live.committed += count;
      // Evicts sometimes at once, and sometimes only before the sequence's next
      // step.
      if (cache_.eviction_due(SequenceId(id)) && Below(2) == 0) Evict(id);
      Check();
    }
  }

  static std::vector<uint64_t> PrefixValues(const std::vector<int32_t>& ids) {
    std::vector<uint64_t> values;
    uint64_t value = 1;
    for (int32_t id : ids) {
      value = (value ^ static_cast<uint64_t>(id + 1)) * 0x9E3779B97F4A7C15u;
      values.push_back(value);
    }
    return values;
  }

  void Write(int64_t id, int64_t count) {
    Live& live = live_[id];
    const std::vector<uint64_t> values = PrefixValues(live.tokens);
    for (uint32_t g = 0; g < options_.config.groups.size(); ++g) {
      for (int64_t p = live.committed; p < live.committed + count; ++p) {
        const uint64_t value = values[static_cast<size_t>(p)];
        int64_t slot = p;
        if (Evicts(g)) {
          slot = static_cast<int64_t>(live.held[g].size());
          live.held[g].push_back(value);
        }
        model_.Write(SequenceId(id), g, slot, value);
        if (model_.RingRows(g) == 0) continue;
        *model_.InRing(SequenceId(id), g, p) = value;
      }
    }
  }

  // Checks, before the step writes, that the rings in the sequence's side pages
  // hold its latest slots.
  void ReadRings(int64_t id) {
    const Live& live = live_[id];
    const std::vector<uint64_t> values = PrefixValues(live.tokens);
    for (uint32_t g = 0; g < options_.config.groups.size(); ++g) {
      const int64_t rows = model_.RingRows(g);
      for (int64_t p = std::max<int64_t>(0, live.committed - rows);
           p < live.committed; ++p) {
        ASSERT_EQ(*model_.InRing(SequenceId(id), g, p),
                  values[static_cast<size_t>(p)])
            << "sequence " << id << " group " << g << " row " << p;
      }
    }
  }

  // Checks, after all writes of the step, that the slots which the first query
  // attends to still hold this sequence's own content.
  void ReadBack(int64_t id) {
    const Live& live = live_[id];
    const std::vector<uint64_t> values = PrefixValues(live.tokens);
    for (const auto& [group, held] : live.held) {
      for (size_t s = 0; s < held.size(); ++s) {
        ASSERT_EQ(model_.Read(SequenceId(id), group, static_cast<int64_t>(s)),
                  held[s])
            << "sequence " << id << " group " << group << " slot " << s;
      }
    }
    for (uint32_t g = 0; g < options_.config.groups.size(); ++g) {
      if (Evicts(g)) continue;
      const int64_t first = FirstVisibleToken(
          options_.config.groups[g].sliding_window, live.committed);
      for (int64_t p = first; p < live.committed; ++p) {
        ASSERT_EQ(model_.Read(SequenceId(id), g, p),
                  values[static_cast<size_t>(p)])
            << "sequence " << id << " group " << g << " position " << p;
      }
    }
  }

  // Forks a random sequence. Sometimes the fork itself is forked before it
  // runs, and ends before its own child.
  void Fork() {
    const int64_t child = ForkOf(AnyLive());
    if (child < 0 || Below(2) == 0) return;
    if (ForkOf(child) >= 0 && Below(2) == 0) End(child, &KvCache::Release);
  }

  // Forks `parent` and returns the child's id, or -1 if no fork is possible
  // now.
  int64_t ForkOf(int64_t parent) {
    if (cache_.reserved_tokens(SequenceId(parent)) != 0 ||
        !cache_.can_fork(SequenceId(parent))) {
      return -1;
    }
    const int64_t child = next_id_++;
    cache_.Fork(SequenceId(parent), SequenceId(child));
    live_[child] = live_[parent];
    EXPECT_EQ(cache_.logical_tokens(SequenceId(child)), live_[child].committed);
    return child;
  }

  void End(int64_t id, void (KvCache::*how)(SequenceId)) {
    const int64_t want = cache_.PagesFreedByRelease(SequenceId(id));
    const int64_t before = FreePages();
    (cache_.*how)(SequenceId(id));
    EXPECT_EQ(FreePages() - before, want);
    model_.Drop(SequenceId(id));
    live_.erase(id);
  }

  int64_t FreePages() const {
    int64_t pages = 0;
    for (int64_t g = 0; g < cache_.num_page_groups(); ++g) {
      pages += cache_.available_pages(PageGroupId(static_cast<int32_t>(g)));
    }
    return pages;
  }

  bool HasHostPool() const {
    return options_.config.groups[0].num_host_pages > 0;
  }

  void Export(int64_t id) {
    const ImageShape shape = cache_.ShapeOf(SequenceId(id));
    const int64_t want = cache_.PagesFreedByRelease(SequenceId(id));
    const int64_t before = FreePages();
    std::optional<SequenceImage> image = cache_.Export(SequenceId(id));
    if (!image.has_value()) {
      EXPECT_EQ(FreePages(), before);
      return;
    }
    EXPECT_EQ(image->shape, shape);
    EXPECT_EQ(FreePages() - before, want);
    images_.emplace_back(std::move(live_[id]), *std::move(image));
    model_.Drop(SequenceId(id));
    live_.erase(id);
  }

  // Imports a random image, or drops it.
  void Import() {
    if (images_.empty()) return;
    const int64_t index = Below(static_cast<int64_t>(images_.size()));
    auto& [live, image] = images_[static_cast<size_t>(index)];
    const SequenceId id(next_id_++);
    StartOptions options;
    options.publish_prefix = Below(8) != 0;
    options.prompt_tokens = live.prompt;
    const ImageShape shape = image.shape;
    const int64_t before = FreePages();
    if (Below(8) != 0) {
      if (!cache_.Import(id, &image, live.tokens, options)) {
        EXPECT_EQ(FreePages(), before);
        return;
      }
      EXPECT_EQ(cache_.ShapeOf(id), shape);
      live_[id.value()] = std::move(live);
    }
    images_.erase(images_.begin() + index);
  }

  void Restart() {
    const int64_t id = AnyLive();
    std::vector<int32_t> tokens = live_[id].tokens;
    const int64_t prompt = live_[id].prompt;
    End(id, &KvCache::Preempt);
    Start(std::move(tokens), prompt);
  }

  void Check() {
    const absl::Status invariants = cache_.CheckInvariants();
    ASSERT_TRUE(invariants.ok()) << invariants;
  }

  const Options options_;
  std::mt19937_64 random_;
  SlotModel model_;
  KvCache cache_;
  std::map<int64_t, Live> live_;
  std::vector<std::pair<Live, SequenceImage>> images_;
  int64_t next_id_ = 0;
};

KvCacheConfig Config(std::vector<KvCacheConfig::Group> groups) {
  KvCacheConfig config;
  config.page_tokens = kPageTokens;
  config.groups = std::move(groups);
  return config;
}

constexpr int kSeeds = 40;
constexpr int kOperations = 150;

// How often each event happened, summed over the runs of all seeds. Each test
// checks that the events that it is about have happened.
struct Met {
  int64_t evicted = 0;
  int64_t copied = 0;
  int64_t hits = 0;
  int64_t window_released = 0;
  int64_t unpublished = 0;
  int64_t tails = 0;
  int64_t exports = 0;
  int64_t imports = 0;
  int64_t slots_evicted = 0;
  int64_t forks = 0;
};

Met RunSeeds(Options options) {
  Met met;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    options.seed = seed;
    RandomRun run(options);
    run.Run(kOperations);
    if (::testing::Test::HasFailure()) break;
    const KvCacheStats stats = run.stats();
    met.evicted += stats.pages_evicted;
    met.copied += stats.pages_copied;
    met.hits += stats.hit_tokens;
    met.window_released += stats.pages_window_released;
    met.unpublished += stats.pages_unpublished;
    met.tails += stats.tails_published;
    met.exports += stats.exports;
    met.imports += stats.imports;
    met.slots_evicted += stats.slots_evicted;
    met.forks += stats.forks;
  }
  return met;
}

TEST(KvCacheRandomTest, InvariantsHoldForOnePageGroup) {
  const Met met = RunSeeds({.config = Config({{.num_pages = 24}})});
  EXPECT_GT(met.evicted, 0);
  EXPECT_GT(met.copied, 0);
  EXPECT_GT(met.hits, 0);
  EXPECT_EQ(met.unpublished, 0);
}

TEST(KvCacheRandomTest, InvariantsHoldInAPoolOfFewPages) {
  const Met met = RunSeeds({.config = Config({{.num_pages = 9}})});
  EXPECT_GT(met.evicted, 0);
}

TEST(KvCacheRandomTest, InvariantsHoldForGroupsWithAndWithoutAWindow) {
  const Met met =
      RunSeeds({.config = Config({{.num_pages = 30},
                                  {.num_pages = 16, .sliding_window = 6},
                                  {.num_pages = 16, .sliding_window = 1}})});
  EXPECT_GT(met.window_released, 0);
  EXPECT_GT(met.evicted, 0);
  EXPECT_GT(met.hits, 0);
  EXPECT_GT(met.copied, 0);
}

TEST(KvCacheRandomTest, InvariantsHoldIfAllGroupsHaveWindows) {
  const Met met =
      RunSeeds({.config = Config({{.num_pages = 14, .sliding_window = 9}})});
  EXPECT_GT(met.window_released, 0);
  EXPECT_GT(met.hits, 0);
}

TEST(KvCacheRandomTest, InvariantsHoldWithHashCollisions) {
  const Met met =
      RunSeeds({.weak_hash = true,
                .config = Config({{.num_pages = 24},
                                  {.num_pages = 16, .sliding_window = 6}})});
  EXPECT_GT(met.hits, 0);
  EXPECT_GT(met.unpublished, 0);
}

TEST(KvCacheRandomTest, InvariantsHoldWithSidePages) {
  const Met met = RunSeeds(
      {.config = Config({{.num_pages = 30, .side_pages_per_sequence = 2},
                         {.num_pages = 30}})});
  EXPECT_GT(met.hits, 0);
  EXPECT_GT(met.tails, 0);
  EXPECT_GT(met.evicted, 0);
}

TEST(KvCacheRandomTest, InvariantsHoldWithSidePagesInATinyPool) {
  const Met met = RunSeeds(
      {.config = Config({{.num_pages = 11, .side_pages_per_sequence = 2}})});
  EXPECT_GT(met.hits, 0);
  EXPECT_GT(met.evicted, 0);
}

TEST(KvCacheRandomTest, InvariantsHoldWithSidePagesAndWindows) {
  const Met met = RunSeeds(
      {.config = Config({{.num_pages = 40, .side_pages_per_sequence = 1},
                         {.num_pages = 24,
                          .sliding_window = 6,
                          .side_pages_per_sequence = 3}})});
  EXPECT_GT(met.hits, 0);
  EXPECT_GT(met.window_released, 0);
}

TEST(KvCacheRandomTest, InvariantsHoldWithSidePagesAndAWeakHash) {
  const Met met = RunSeeds(
      {.weak_hash = true,
       .config = Config({{.num_pages = 40, .side_pages_per_sequence = 1}})});
  EXPECT_GT(met.hits, 0);
  EXPECT_GT(met.unpublished, 0);
}

TEST(KvCacheRandomTest, InvariantsHoldWhenSequencesMoveToTheHostPoolAndBack) {
  const Met met =
      RunSeeds({.config = Config({{.num_pages = 20, .num_host_pages = 20}})});
  EXPECT_GT(met.exports, 0);
  EXPECT_GT(met.imports, 0);
  EXPECT_GT(met.hits, 0);
}

TEST(KvCacheRandomTest,
     InvariantsHoldWhenSidePagesAndWindowsMoveToATinyHostPool) {
  const Met met = RunSeeds({.weak_hash = true,
                            .config = Config({{.num_pages = 40,
                                               .side_pages_per_sequence = 1,
                                               .num_host_pages = 12},
                                              {.num_pages = 24,
                                               .sliding_window = 6,
                                               .side_pages_per_sequence = 3,
                                               .num_host_pages = 14}})});
  EXPECT_GT(met.exports, 0);
  EXPECT_GT(met.imports, 0);
  EXPECT_GT(met.tails, 0);
}

// Page groups of all kinds: with and without eviction, a window and side pages.
// Prefix reuse is off, because the pages of a group that evicts hold scores and
// are never shared.
KvCacheConfig EvictingConfig(int64_t num_pages, int64_t num_host_pages = 0) {
  KvCacheConfig config = Config(
      {{.num_pages = num_pages,
        .eviction = {.budget_tokens = 7, .every_tokens = 3}},
       {.num_pages = 2 * num_pages},
       {.num_pages = num_pages, .sliding_window = 6},
       {.num_pages = num_pages,
        .side_pages_per_sequence = 1,
        .eviction = {
            .budget_ratio = 0.4, .least_tokens = 3, .every_tokens = 5}}});
  config.prefix_reuse = false;
  for (auto& group : config.groups) group.num_host_pages = num_host_pages;
  return config;
}

TEST(KvCacheRandomTest,
     InvariantsHoldWhenSequencesWithEvictionMoveToTheHostPoolAndBack) {
  const Met met = RunSeeds({.config = EvictingConfig(24, 20)});
  EXPECT_GT(met.slots_evicted, 0);
  EXPECT_GT(met.exports, 0);
  EXPECT_GT(met.imports, 0);
}

TEST(KvCacheRandomTest, InvariantsHoldWithEviction) {
  const Met met = RunSeeds({.config = EvictingConfig(24)});
  EXPECT_GT(met.slots_evicted, 0);
  EXPECT_GT(met.copied, 0);
  EXPECT_GT(met.forks, 0);
  EXPECT_GT(met.window_released, 0);
}

TEST(KvCacheRandomTest, InvariantsHoldWithEvictionAndATinyPool) {
  const Met met = RunSeeds({.config = EvictingConfig(9)});
  EXPECT_GT(met.slots_evicted, 0);
  EXPECT_GT(met.forks, 0);
}

TEST(KvCacheRandomTest, InvariantsHoldInALongRunWithEviction) {
  RandomRun run({.seed = 15, .config = EvictingConfig(20, 12)});
  run.Run(100000);
  EXPECT_GT(run.stats().slots_evicted, 1000);
}

}  // namespace
}  // namespace kvasir::cache
