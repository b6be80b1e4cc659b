// Structured logs through spdlog, as text for people or JSON for machines. Each
// event is one line on standard error.
//
//   base::LogInfo("worker ready", {{"pages", 512}, {"model", name}});
//
// Never log prompt text, token ids or cache salts.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "absl/status/status.h"

namespace kvasir::base {

enum class LogFormat { kText, kJson };
enum class LogLevel { kDebug, kInfo, kWarning, kError, kOff };

// Field texts are cut to this length, because clients choose some of them.
inline constexpr size_t kMaxLogFieldBytes = 1024;

// Marks a field's text that is never cut. Only for texts that no client
// can choose.
struct LogWhole {
  std::string_view text;
};

// A named value of an event.
class LogField {
 public:
  using Value = std::variant<std::string, int64_t, double, bool>;

  LogField(std::string_view name, std::string_view value);
  LogField(std::string_view name, const char* value)
      : LogField(name, std::string_view(value)) {}
  LogField(std::string_view name, LogWhole value)
      : name_(name), value_(std::string(value.text)) {}
  LogField(std::string_view name, bool value) : name_(name), value_(value) {}
  LogField(std::string_view name, double value) : name_(name), value_(value) {}
  template <typename Integer>
  requires std::is_integral_v<Integer> LogField(std::string_view name,
                                                Integer value)
      : name_(name), value_(static_cast<int64_t>(value)) {}

  std::string_view name() const { return name_; }
  const Value& value() const { return value_; }

 private:
  std::string_view name_;
  Value value_;
};

// Threads: call it once, before other threads exist. The Log functions may
// then be called from any thread. If it is not called, the log is text at
// info level.
void InitLogging(LogFormat format, LogLevel level);

// From now on, every line contains this process's rank in its tensor-parallel
// group. Like InitLogging, it must be called before other threads exist.
void SetLogRank(int rank);

// Parse "text" or "json", and "debug", "info", "warning", "error" or "off".
// INVALID_ARGUMENT for other names.
absl::Status ParseLogFormat(std::string_view name, LogFormat* format);
absl::Status ParseLogLevel(std::string_view name, LogLevel* level);

void Log(LogLevel level, std::string_view message,
         std::initializer_list<LogField> fields = {});

inline void LogInfo(std::string_view message,
                    std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kInfo, message, fields);
}
inline void LogWarning(std::string_view message,
                       std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kWarning, message, fields);
}
inline void LogError(std::string_view message,
                     std::initializer_list<LogField> fields = {}) {
  Log(LogLevel::kError, message, fields);
}

// Makes text from a file or a client safe for a terminal. Control characters
// except line breaks and tabs are escaped as "\x1b" or "\u009b", so that the
// text cannot move the cursor or change colours.
std::string Printable(std::string_view text);

// Returns the part of a log line that follows time, level and rank. In JSON
// form, the object's opening brace comes before these, so it is missing here.
std::string FormatLogEvent(LogFormat format, std::string_view message,
                           std::initializer_list<LogField> fields);

}  // namespace kvasir::base
