#include "router/base/task_runner.h"

#include <map>
#include <utility>

namespace kvasir::router {
namespace {

// A strand runs at most this many tasks in a row, so that other strands get
// their turn.
constexpr size_t kTasksPerTurn = 64;

}  // namespace

class TaskPool::Queue final : public TaskRunner {
 public:
  explicit Queue(size_t max_queued) : max_queued_(max_queued) {}

  bool Post(Task task) override { return PostInTurn("", std::move(task)); }
  bool PostInTurn(const std::string& turn, Task task) override {
    base::MutexLock lock(&mutex_);
    if (stopped_) return false;
    const auto [entry, is_new] = tasks_.try_emplace(turn);
    const size_t own = entry->second.size();
    if (own >= max_queued_ - num_queued_) {
      if (is_new) tasks_.erase(entry);
      return false;
    }
    ++num_queued_;
    entry->second.push_back(std::move(task));
    if (own == 0) turns_.push_back(entry);
    changed_.Signal();
    return true;
  }

  // Runs tasks on the calling thread until Stop.
  void RunTasks() {
    while (true) {
      Task task;
      {
        base::MutexLock lock(&mutex_);
        while (!stopped_ && turns_.empty()) changed_.Wait(&mutex_);
        if (stopped_) return;
        task = TakeNext();
      }
      task();
    }
  }

  void Stop() {
    Tasks dropped;  // destroyed after the lock is released
    base::MutexLock lock(&mutex_);
    stopped_ = true;
    turns_.clear();
    dropped.swap(tasks_);
    changed_.SignalAll();
  }

 private:
  using Tasks = std::map<std::string, std::deque<Task>>;

  Task TakeNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const Tasks::iterator turn = turns_.front();
    turns_.pop_front();
    --num_queued_;
    Task task = std::move(turn->second.front());
    turn->second.pop_front();
    if (!turn->second.empty()) {
      turns_.push_back(turn);
    } else if (!turn->first.empty()) {
      // Keep the entry of the turn "", because strands use it all the time.
      tasks_.erase(turn);
    }
    return task;
  }

  const size_t max_queued_;
  base::Mutex mutex_;
  base::CondVar changed_;
  size_t num_queued_ ABSL_GUARDED_BY(mutex_) = 0;
  // The waiting tasks of each turn (client). Except for "", a turn without
  // tasks has no entry.
  Tasks tasks_ ABSL_GUARDED_BY(mutex_);
  // The turns that have tasks, in the order in which they will be served.
  std::deque<Tasks::iterator> turns_ ABSL_GUARDED_BY(mutex_);
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

TaskPool::TaskPool(int num_threads, size_t max_queued)
    : queue_(std::make_shared<Queue>(max_queued)), runner_(queue_) {
  for (int i = 0; i < num_threads; ++i) {
    threads_.emplace_back([queue = queue_] { queue->RunTasks(); });
  }
}

TaskPool::~TaskPool() {
  queue_->Stop();
  for (std::thread& thread : threads_) thread.join();
}

std::shared_ptr<Strand> Strand::Create(std::shared_ptr<TaskRunner> runner) {
  return std::shared_ptr<Strand>(new Strand(std::move(runner)));
}

bool Strand::Post(Task task) {
  {
    base::MutexLock lock(&mutex_);
    tasks_.push_back(std::move(task));
    if (scheduled_) return true;
    scheduled_ = true;
  }
  return Schedule();
}

// The task that a strand posts to its runner. It runs some of the tasks that
// were posted to the strand. If it is destroyed without being run, the strand
// drops all its tasks.
class Strand::Turn {
 public:
  explicit Turn(std::shared_ptr<Strand> strand) : strand_(std::move(strand)) {}
  Turn(Turn&&) = default;
  Turn& operator=(Turn&&) = delete;
  ~Turn() {
    if (strand_ != nullptr) strand_->DropAll();
  }

  void operator()() { std::exchange(strand_, nullptr)->RunSome(); }

 private:
  std::shared_ptr<Strand> strand_;  // null once the turn has run
};

bool Strand::Schedule() { return runner_->Post(Turn(shared_from_this())); }

void Strand::DropAll() {
  std::deque<Task> dropped;  // destroyed after the lock is released
  base::MutexLock lock(&mutex_);
  dropped.swap(tasks_);
  scheduled_ = false;
}

void Strand::RunSome() {
  for (size_t i = 0; i < kTasksPerTurn; ++i) {
    Task task;
    {
      base::MutexLock lock(&mutex_);
      if (tasks_.empty()) {
        scheduled_ = false;
        return;
      }
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
  Schedule();
}

}  // namespace kvasir::router
