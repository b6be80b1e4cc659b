// A small language for tests of KvCache. Each line has one command, optionally
// followed by "->" and the expected answer, and by "#" and a comment. The
// cache's invariants are checked after each command.
//
//   start NAME TOKENS [salt=X] [noreuse] [nopublish] [prompt=N]
//         [keep=N|all]           -> cached N      (keep: kept slots)
//   probe TOKENS [salt=X]        -> cached N      (changes nothing)
//   append NAME TOKENS           (sampled tokens, which run later)
//   reserve NAME N               -> ok  |  no gG want N free N
//   commit NAME N                (the next N tokens of the sequence)
//   step NAME N                  reserve and commit; answers like reserve
//   fork PARENT CHILD | release NAME | preempt NAME | drop
//   export NAME                  -> ok  |  no     (to the host pool)
//   import NAME                  -> ok  |  a refusal like reserve's
//   forget NAME                  (destroys an exported image)
//   host [gG]                    -> used N free N (pages of the host pool)
//   pages NAME [gG]              -> ids from the first live entry on
//   side NAME [gG]               -> ids of the side pages
//   cut NAME                     -> N             (where a step should end)
//   next NAME                    -> N | never     (where a step must end)
//   due NAME                     -> yes | no
//   evict NAME
//   evictions                    -> gG NAME@TOKENS SLOTS>KEPT in ID ID after
//                                   COPIES; ... ("after" is left out if 0)
//   tails [gG]                   -> number of pages that all tails take
//   delta NAME                   -> gG[ reset] live=N +ID side+ID; ...
//   copies                       -> gG FROM>TO; ...  (hN: page N of the host)
//   lengths NAME [gG]            -> logical N physical N
//   pool [gG]                    -> used N free N cached N
//
// TOKENS: ids and ranges, "1 2 10..13". gG: page group G; by default g0.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "cache/kv_cache.h"

namespace kvasir::cache {

class KvCacheScenario {
 public:
  explicit KvCacheScenario(KvCacheConfig config,
                           std::unique_ptr<PrefixHasher> hasher = nullptr);

  // Runs a script. Every difference is a test failure that shows its line.
  void Run(absl::string_view script);
  // Runs one command and returns its answer in the form described above.
  std::string Do(absl::string_view command);

  KvCache& cache() { return cache_; }

 private:
  struct Words;
  struct Known {
    SequenceId id;
    std::vector<int32_t> tokens;
    int64_t committed = 0;
  };

  Known& Get(const std::string& name);
  std::string Start(const std::string& name, const Words& words);
  std::string Reserve(Known& sequence, int64_t tokens);
  void Commit(Known& sequence, int64_t tokens);
  std::string Export(const std::string& name);
  std::string Import(const std::string& name, const Words& words);
  std::string Delta(const Known& sequence);
  std::string Copies();
  std::string Evictions();
  std::string NameOf(SequenceId id) const;

  KvCache cache_;
  std::map<std::string, Known> known_;
  std::map<std::string, std::pair<Known, SequenceImage>> images_;
  int64_t next_id_ = 0;
};

}  // namespace kvasir::cache
