#include "cache/testing/kv_cache_scenario.h"

#include <cstdlib>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/check.h"
#include "base/status_matchers.h"

namespace kvasir::cache {

// The arguments of a command, sorted by kind: numbers, names and options.
struct KvCacheScenario::Words {
  std::vector<int32_t> numbers;  // ids; a range such as 1..3 adds all its ids
  std::vector<std::string> names;
  PageGroupId group{0};
  // The slots that stay at an eviction. -1: not given; 0: all.
  int64_t keep = -1;
  StartOptions options;

  explicit Words(absl::string_view text) {
    for (absl::string_view word :
         absl::StrSplit(text, ' ', absl::SkipWhitespace())) {
      Add(word);
    }
  }

  void Add(absl::string_view word) {
    const std::vector<std::string> range = absl::StrSplit(word, "..");
    int32_t first = 0;
    int32_t last = 0;
    if (absl::SimpleAtoi(range[0], &first)) {
      last = first;
      if (range.size() == 2) KVASIR_CHECK(absl::SimpleAtoi(range[1], &last));
      for (int32_t n = first; n <= last; ++n) numbers.push_back(n);
    } else if (absl::ConsumePrefix(&word, "salt=")) {
      options.salt = std::string(word);
    } else if (absl::ConsumePrefix(&word, "prompt=")) {
      KVASIR_CHECK(absl::SimpleAtoi(word, &options.prompt_tokens));
    } else if (absl::ConsumePrefix(&word, "keep=")) {
      keep = word == "all" ? 0 : -1;
      KVASIR_CHECK(keep == 0 || absl::SimpleAtoi(word, &keep));
    } else if (word == "noreuse") {
      options.reuse_prefix = false;
    } else if (word == "nopublish") {
      options.publish_prefix = false;
    } else if (word.size() == 2 && word[0] == 'g' && word[1] >= '0' &&
               word[1] <= '9') {
      group = PageGroupId(word[1] - '0');
    } else {
      names.emplace_back(word);
    }
  }

  const std::string& name(size_t index) const {
    KVASIR_CHECK(index < names.size());
    return names[index];
  }
  int64_t number() const {
    KVASIR_CHECK(numbers.size() == 1);
    return numbers[0];
  }
};

namespace {

std::string Ids(const std::vector<PageId>& pages) {
  return absl::StrJoin(pages, " ", [](std::string* out, PageId page) {
    absl::StrAppend(out, page.value());
  });
}

std::string Answer(const ReserveResult& result) {
  if (result) return "ok";
  return absl::StrCat("no g", result.group.value(), " want ", result.want_pages,
                      " free ", result.free_pages);
}

}  // namespace

KvCacheScenario::KvCacheScenario(KvCacheConfig config,
                                 std::unique_ptr<PrefixHasher> hasher)
    : cache_(std::move(config), std::move(hasher)) {}

void KvCacheScenario::Run(absl::string_view script) {
  for (absl::string_view line : absl::StrSplit(script, '\n')) {
    line = absl::StripAsciiWhitespace(line.substr(0, line.find('#')));
    if (line.empty()) continue;
    SCOPED_TRACE(std::string(line));
    const std::vector<std::string> halves =
        absl::StrSplit(line, absl::MaxSplits("->", 1));
    const std::string answer = Do(halves[0]);
    if (halves.size() == 2) {
      EXPECT_EQ(answer, std::string(absl::StripAsciiWhitespace(halves[1])));
    }
    const absl::Status invariants = cache_.CheckInvariants();
    ASSERT_TRUE(invariants.ok()) << invariants;
  }
}

std::string KvCacheScenario::Do(absl::string_view command) {
  std::vector<std::string> parts = absl::StrSplit(
      absl::StripAsciiWhitespace(command), absl::MaxSplits(' ', 1));
  const std::string verb = parts[0];
  const Words words(parts.size() > 1 ? parts[1] : "");
  if (verb == "drop") {
    cache_.DropPrefixCache();
    return "";
  }
  if (verb == "copies") return Copies();
  if (verb == "evictions") return Evictions();
  if (verb == "pool") {
    const PageGroupStats stats =
        cache_.Stats().groups[static_cast<size_t>(words.group.value())];
    return absl::StrCat("used ", stats.used_pages, " free ", stats.free_pages,
                        " cached ", stats.cached_pages);
  }
  if (verb == "tails") {
    return absl::StrCat(cache_.Stats()
                            .groups[static_cast<size_t>(words.group.value())]
                            .tail_pages);
  }
  if (verb == "host") {
    const PageGroupStats stats =
        cache_.Stats().groups[static_cast<size_t>(words.group.value())];
    return absl::StrCat("used ", stats.host_used_pages, " free ",
                        stats.host_pages - stats.host_used_pages);
  }
  if (verb == "probe") {
    return absl::StrCat(
        "cached ", cache_.CachedPrefixTokens(words.numbers, words.options));
  }
  const std::string name = words.name(0);
  if (verb == "start") return Start(name, words);
  if (verb == "export") return Export(name);
  if (verb == "import") return Import(name, words);
  if (verb == "forget") {
    KVASIR_CHECK(images_.erase(name) == 1);
    return "";
  }
  Known& sequence = Get(name);
  if (verb == "append") {
    sequence.tokens.insert(sequence.tokens.end(), words.numbers.begin(),
                           words.numbers.end());
    return "";
  }
  if (verb == "reserve") return Reserve(sequence, words.number());
  if (verb == "commit") {
    Commit(sequence, words.number());
    return "";
  }
  if (verb == "step") {
    const std::string answer = Reserve(sequence, words.number());
    if (answer == "ok") Commit(sequence, words.number());
    return answer;
  }
  if (verb == "fork") {
    Known child = sequence;
    child.id = SequenceId(next_id_++);
    cache_.Fork(sequence.id, child.id);
    known_[words.name(1)] = std::move(child);
    return "";
  }
  if (verb == "release" || verb == "preempt") {
    verb == "release" ? cache_.Release(sequence.id)
                      : cache_.Preempt(sequence.id);
    known_.erase(name);
    return "";
  }
  if (verb == "pages") return Ids(cache_.Pages(sequence.id, words.group));
  if (verb == "side") return Ids(cache_.SidePages(sequence.id, words.group));
  if (verb == "cut") return absl::StrCat(cache_.tail_cut(sequence.id));
  if (verb == "next") {
    const std::optional<int64_t> next = cache_.next_eviction(sequence.id);
    return next ? absl::StrCat(*next) : "never";
  }
  if (verb == "due") return cache_.eviction_due(sequence.id) ? "yes" : "no";
  if (verb == "evict") {
    cache_.Evict(sequence.id);
    return "";
  }
  if (verb == "delta") return Delta(sequence);
  if (verb == "lengths") {
    return absl::StrCat("logical ", cache_.logical_tokens(sequence.id),
                        " physical ",
                        cache_.physical_tokens(sequence.id, words.group));
  }
  ADD_FAILURE() << "unknown command: " << command;
  return "";
}

KvCacheScenario::Known& KvCacheScenario::Get(const std::string& name) {
  const auto it = known_.find(name);
  KVASIR_CHECK(it != known_.end());
  return it->second;
}

std::string KvCacheScenario::Start(const std::string& name,
                                   const Words& words) {
  Known added{SequenceId(next_id_++), words.numbers};
  StartOptions options = words.options;
  std::vector<plan::EvictionCounts> evictions;
  for (int32_t g = 0; words.keep >= 0 && g < cache_.num_page_groups(); ++g) {
    evictions.push_back(cache_.sequence_pages(PageGroupId(g)).eviction);
    evictions.back().budget_tokens = words.keep;
    if (words.keep == 0) evictions.back() = {};
  }
  options.evictions = evictions;
  added.committed =
      cache_.StartSequence(added.id, added.tokens, options).cached_tokens;
  KVASIR_CHECK(known_.emplace(name, added).second);
  return absl::StrCat("cached ", added.committed);
}

std::string KvCacheScenario::Reserve(Known& sequence, int64_t tokens) {
  return Answer(cache_.Reserve(sequence.id, tokens));
}

std::string KvCacheScenario::Export(const std::string& name) {
  std::optional<SequenceImage> image = cache_.Export(Get(name).id);
  if (!image.has_value()) return "no";
  images_.emplace(name, std::pair(Get(name), *std::move(image)));
  known_.erase(name);
  return "ok";
}

std::string KvCacheScenario::Import(const std::string& name,
                                    const Words& words) {
  auto& [sequence, image] = images_.at(name);
  const SequenceId id(next_id_++);
  const std::string answer =
      Answer(cache_.Import(id, &image, sequence.tokens, words.options));
  if (answer == "ok") {
    sequence.id = id;
    known_[name] = sequence;
    images_.erase(name);
  }
  return answer;
}

void KvCacheScenario::Commit(Known& sequence, int64_t tokens) {
  const int64_t end = sequence.committed + tokens;
  KVASIR_CHECK(end <= static_cast<int64_t>(sequence.tokens.size()));
  cache_.Commit(sequence.id,
                absl::MakeConstSpan(sequence.tokens)
                    .subspan(static_cast<size_t>(sequence.committed),
                             static_cast<size_t>(tokens)));
  sequence.committed = end;
}

std::string KvCacheScenario::Delta(const Known& sequence) {
  kvasir::v1::SequenceStep step;
  cache_.TakeDeltas(sequence.id, &step);
  return absl::StrJoin(
      step.block_tables(), "; ",
      [](std::string* out, const kvasir::v1::BlockTableDelta& delta) {
        absl::StrAppend(out, "g", delta.page_group(),
                        delta.reset() ? " reset" : "",
                        " live=", delta.first_live_index());
        for (int32_t page : delta.appended_pages()) {
          absl::StrAppend(out, " +", page);
        }
        for (int32_t page : delta.side_pages()) {
          absl::StrAppend(out, " side+", page);
        }
      });
}

std::string KvCacheScenario::Evictions() {
  google::protobuf::RepeatedPtrField<kvasir::v1::SlotEviction> evictions;
  cache_.TakeEvictions(&evictions);
  return absl::StrJoin(
      evictions, "; ",
      [this](std::string* out, const kvasir::v1::SlotEviction& eviction) {
        absl::StrAppend(
            out, "g", eviction.page_group(), " ",
            NameOf(SequenceId(static_cast<int64_t>(eviction.sequence_id()))),
            "@", eviction.logical_tokens(), " ", eviction.num_slots(), ">",
            eviction.kept_slots(), " in ",
            absl::StrJoin(eviction.pages(), " "));
        if (eviction.after_page_copies() > 0) {
          absl::StrAppend(out, " after ", eviction.after_page_copies());
        }
      });
}

std::string KvCacheScenario::NameOf(SequenceId id) const {
  for (const auto& [name, known] : known_) {
    if (known.id == id) return name;
  }
  return "(gone)";
}

std::string KvCacheScenario::Copies() {
  google::protobuf::RepeatedPtrField<kvasir::v1::PageCopy> copies;
  cache_.TakePageCopies(&copies);
  return absl::StrJoin(
      copies, "; ", [](std::string* out, const kvasir::v1::PageCopy& copy) {
        absl::StrAppend(out, "g", copy.page_group(), " ",
                        copy.from_host() ? "h" : "", copy.from_page(), ">",
                        copy.to_host() ? "h" : "", copy.to_page());
      });
}

}  // namespace kvasir::cache
