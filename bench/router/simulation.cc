#include "bench/router/simulation.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <memory>
#include <queue>
#include <random>
#include <tuple>

#include "absl/container/flat_hash_set.h"
#include "bench/paired.h"
#include "bench/router/page_cache.h"

namespace kvasir::bench {
namespace {

using router::MixBits;
using router::ReplicaView;

enum class EventKind { kPromptDone, kOutputDone, kReport };

struct Event {
  double time_s = 0.0;
  uint64_t order = 0;  // events at the same time stay in order
  EventKind kind = EventKind::kReport;
  uint32_t replica = 0;
  size_t request = 0;

  friend bool operator>(const Event& a, const Event& b) {
    return std::tie(a.time_s, a.order) > std::tie(b.time_s, b.order);
  }
};

struct Replica {
  explicit Replica(size_t cache_pages) : cache(cache_pages) {}

  PageCache cache;
  std::deque<size_t> waiting;
  uint32_t running = 0;
  bool prompt_runs = false;
  double busy_s = 0.0;
  double next_report_s = 0.0;
  bool report_planned = false;

  uint32_t load() const {
    return running + static_cast<uint32_t>(waiting.size());
  }
};

class Simulation {
 public:
  Simulation(const Trace& trace, const SimulationOptions& options)
      : trace_(trace), options_(options), random_(options.seed) {
    for (uint32_t i = 0; i < options.replicas; ++i) {
      replicas_.emplace_back(options.cache_pages);
    }
    for (uint32_t i = 0; i < options.routers; ++i) {
      router::PickerOptions picker = options.picker;
      picker.seed = MixBits(options.seed, i);
      pickers_.push_back(std::make_unique<router::ReplicaPicker>(picker));
    }
    std::vector<ReplicaView> views;
    for (uint32_t i = 0; i < options.replicas; ++i) {
      ReplicaView view;
      view.eligible = true;
      view.free_pages = view.total_pages = options.cache_pages;
      view.page_tokens = trace.page_tokens;
      view.max_num_seqs = options.max_num_seqs;
      view.name = MixBits(1, i);
      view.incarnation = i + 1;
      views.push_back(view);
    }
    views_.assign(options.routers, views);
  }

  SimulationResult Run() {
    for (size_t i = 0; i < trace_.requests.size(); ++i) {
      const double now_s = trace_.requests[i].arrival_s;
      while (!events_.empty() && events_.top().time_s <= now_s) NextEvent();
      Arrive(i, now_s);
    }
    while (!events_.empty()) NextEvent();
    return Result();
  }

 private:
  void NextEvent() {
    const Event event = events_.top();
    events_.pop();
    now_s_ = event.time_s;
    Replica& replica = replicas_[event.replica];
    switch (event.kind) {
      case EventKind::kPromptDone:
        replica.prompt_runs = false;
        break;
      case EventKind::kOutputDone:
        --replica.running;
        trace_.PagesOf(event.request, /*output=*/false, &pages_);
        replica.cache.Release(pages_);
        trace_.PagesOf(event.request, /*output=*/true, &pages_);
        replica.cache.Add(pages_);
        break;
      case EventKind::kReport:
        replica.report_planned = false;
        Report(event.replica);
        return;
    }
    StartPrompt(event.replica);
    Changed(event.replica);
  }

  void Plan(double after_s, EventKind kind, uint32_t replica,
            size_t request = 0) {
    events_.push({now_s_ + after_s, ++order_, kind, replica, request});
  }

  void Arrive(size_t request, double now_s) {
    now_s_ = now_s;
    MeasureBalance(request);
    const size_t at = random_() % pickers_.size();
    trace_.PagesOf(request, /*output=*/false, &pages_);
    const TraceRequest& from = trace_.requests[request];
    const auto start = std::chrono::steady_clock::now();
    const size_t picked =
        options_.two_choices
            ? PickOfTwo(views_[at], from.prompt_tokens)
            : *pickers_[at]->Pick(
                  views_[at],
                  {.prompt_tokens = from.prompt_tokens,
                   .pages = absl::MakeConstSpan(pages_).first(
                       std::min(pages_.size(), router::kMaxKeyedPages)),
                   .session = options_.sessions ? from.session : 0});
    choosing_ += std::chrono::steady_clock::now() - start;
    ++views_[at][picked].unreported_requests;
    views_[at][picked].unreported_tokens += from.prompt_tokens;
    replicas_[picked].waiting.push_back(request);
    StartPrompt(static_cast<uint32_t>(picked));
    Changed(static_cast<uint32_t>(picked));
  }

  size_t PickOfTwo(const std::vector<ReplicaView>& views, uint32_t tokens) {
    const size_t places[] = {random_() % views.size(),
                             random_() % views.size()};
    const ReplicaView two[] = {views[places[0]], views[places[1]]};
    return places[*router::PickReplica(router::PolicyKind::kLeastLoaded, two,
                                       {.prompt_tokens = tokens}, 0)];
  }

  void StartPrompt(uint32_t index) {
    Replica& replica = replicas_[index];
    if (replica.prompt_runs || replica.waiting.empty() ||
        replica.running == options_.max_num_seqs) {
      return;
    }
    const size_t request = replica.waiting.front();
    replica.waiting.pop_front();
    ++replica.running;
    replica.prompt_runs = true;
    trace_.PagesOf(request, /*output=*/false, &pages_);
    const TraceRequest& from = trace_.requests[request];
    // At least one token runs, because the output needs its result.
    const auto cached = std::min<uint32_t>(
        static_cast<uint32_t>(replica.cache.Hits(pages_)) * trace_.page_tokens,
        from.prompt_tokens - 1);
    replica.cache.Use(pages_);
    const double prompt_s = options_.step_s + (from.prompt_tokens - cached) /
                                                  options_.prompt_tokens_per_s;
    replica.busy_s += prompt_s;
    cached_tokens_ += cached;
    prompt_tokens_ += from.prompt_tokens;
    queue_s_.push_back(now_s_ - from.arrival_s);
    first_token_s_.push_back(now_s_ + prompt_s - from.arrival_s);
    Plan(prompt_s, EventKind::kPromptDone, index);
    Plan(prompt_s + from.output_tokens * options_.token_s,
         EventKind::kOutputDone, index, request);
  }

  void Changed(uint32_t index) {
    Replica& replica = replicas_[index];
    if (replica.report_planned) return;
    if (now_s_ >= replica.next_report_s) {
      Report(index);
    } else {
      replica.report_planned = true;
      Plan(replica.next_report_s - now_s_, EventKind::kReport, index);
    }
  }

  void Report(uint32_t index) {
    Replica& replica = replicas_[index];
    replica.next_report_s = now_s_ + options_.report_s;
    for (std::vector<ReplicaView>& views : views_) {
      ReplicaView& view = views[index];
      view.running = replica.running;
      view.waiting = static_cast<uint32_t>(replica.waiting.size());
      view.free_pages =
          view.total_pages - std::min(view.total_pages, replica.cache.used());
      view.unreported_requests = 0;
      view.unreported_tokens = 0;
    }
  }

  // With many replicas, a part of the arrivals is enough.
  void MeasureBalance(size_t request) {
    if (request % (1 + replicas_.size() / 8) != 0) return;
    uint64_t sum = 0;
    uint32_t most = 0;
    for (const Replica& replica : replicas_) {
      sum += replica.load();
      most = std::max(most, replica.load());
    }
    if (sum == 0) return;
    imbalance_ += static_cast<double>(most) *
                  static_cast<double>(replicas_.size()) /
                  static_cast<double>(sum);
    ++measured_;
  }

  SimulationResult Result() const {
    SimulationResult result;
    result.hit_rate = static_cast<double>(cached_tokens_) /
                      static_cast<double>(prompt_tokens_);
    result.imbalance = imbalance_ / static_cast<double>(measured_);
    double busy_s = 0.0;
    double most_s = 0.0;
    for (const Replica& replica : replicas_) {
      busy_s += replica.busy_s;
      most_s = std::max(most_s, replica.busy_s);
    }
    result.work_imbalance =
        most_s * static_cast<double>(replicas_.size()) / busy_s;
    result.busiest = most_s / trace_.requests.back().arrival_s;
    result.queue_s_p50 = Quantile(queue_s_, 0.5);
    result.queue_s_p99 = Quantile(queue_s_, 0.99);
    result.first_token_s_p50 = Quantile(first_token_s_, 0.5);
    result.first_token_s_p99 = Quantile(first_token_s_, 0.99);
    result.choices_per_s = static_cast<double>(trace_.requests.size()) /
                           std::chrono::duration<double>(choosing_).count();
    return result;
  }

  const Trace& trace_;
  const SimulationOptions options_;
  std::mt19937_64 random_;
  std::vector<Replica> replicas_;
  std::vector<std::unique_ptr<router::ReplicaPicker>> pickers_;
  std::vector<std::vector<ReplicaView>> views_;  // [routers][replicas]
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  double now_s_ = 0.0;
  uint64_t order_ = 0;
  std::vector<uint64_t> pages_;

  uint64_t cached_tokens_ = 0;
  uint64_t prompt_tokens_ = 0;
  double imbalance_ = 0.0;
  uint64_t measured_ = 0;
  std::vector<double> queue_s_;
  std::vector<double> first_token_s_;
  std::chrono::steady_clock::duration choosing_{};
};

}  // namespace

SimulationResult Simulate(const Trace& trace,
                          const SimulationOptions& options) {
  return Simulation(trace, options).Run();
}

double BestHitRate(const Trace& trace) {
  absl::flat_hash_set<uint64_t> seen;
  std::vector<uint64_t> pages;
  uint64_t cached = 0;
  uint64_t tokens = 0;
  for (size_t i = 0; i < trace.requests.size(); ++i) {
    const uint32_t prompt = trace.requests[i].prompt_tokens;
    trace.PagesOf(i, /*output=*/false, &pages);
    uint32_t hits = 0;
    while (hits < pages.size() && seen.contains(pages[hits])) ++hits;
    cached += std::min(hits * trace.page_tokens, prompt - 1);
    tokens += prompt;
    trace.PagesOf(i, /*output=*/true, &pages);
    seen.insert(pages.begin(), pages.end());
  }
  return static_cast<double>(cached) / static_cast<double>(tokens);
}

}  // namespace kvasir::bench
