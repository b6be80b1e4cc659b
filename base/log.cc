#include "base/log.h"

#include <atomic>
#include <memory>
#include <optional>

#include "absl/strings/str_cat.h"
#include "base/string_view.h"
#include "nlohmann/json.hpp"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace kvasir::base {
namespace {

std::atomic<LogFormat> g_format{LogFormat::kText};

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
    case LogLevel::kOff:
      return spdlog::level::off;
  }
  return spdlog::level::info;
}

// Returns the logger's line pattern. For JSON, the pattern has the opening
// brace and the first fields of the object; FormatLogEvent adds the other
// fields and the closing brace.
std::string PatternOf(LogFormat format, std::optional<int> rank) {
  if (format == LogFormat::kJson) {
    return absl::StrCat(
        R"({"time":"%Y-%m-%dT%H:%M:%S.%e%z","level":"%l",)",
        rank.has_value() ? absl::StrCat("\"rank\":", *rank, ",") : "", "%v");
  }
  return absl::StrCat("%Y-%m-%dT%H:%M:%S.%e%z %L ",
                      rank.has_value() ? absl::StrCat("rank=", *rank, " ") : "",
                      "%v");
}

spdlog::logger& Logger() {
  // The logger is never destroyed, because threads may log while the
  // process exits.
  static spdlog::logger* const logger = [] {
    auto* made = new spdlog::logger(
        "kvasir", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern(PatternOf(LogFormat::kText, std::nullopt));
    made->flush_on(spdlog::level::trace);
    return made;
  }();
  return *logger;
}

// Replaces invalid UTF-8 (from a client's id, for example), so that a log line
// never throws.
std::string Dump(const nlohmann::ordered_json& json) {
  return json.dump(-1, ' ', false,
                   nlohmann::ordered_json::error_handler_t::replace);
}

bool NeedsQuotes(std::string_view text) {
  if (text.empty()) return true;
  for (const unsigned char c : text) {
    if (c <= ' ' || c == '"' || c == '=' || c >= 0x7f) return true;
  }
  return false;
}

std::string TextValue(const LogField::Value& value) {
  if (const auto* text = std::get_if<std::string>(&value)) {
    return NeedsQuotes(*text) ? Printable(Dump(*text)) : *text;
  }
  if (const auto* integer = std::get_if<int64_t>(&value)) {
    return absl::StrCat(*integer);
  }
  if (const auto* number = std::get_if<double>(&value)) {
    return absl::StrCat(*number);
  }
  return std::get<bool>(value) ? "true" : "false";
}

}  // namespace

LogField::LogField(std::string_view name, std::string_view value)
    : name_(name), value_(std::string(value.substr(0, kMaxLogFieldBytes))) {
  if (value.size() <= kMaxLogFieldBytes) return;
  absl::StrAppend(&std::get<std::string>(value_), "... (", value.size(),
                  " bytes)");
}

void InitLogging(LogFormat format, LogLevel level) {
  g_format = format;
  Logger().set_pattern(PatternOf(format, std::nullopt));
  Logger().set_level(ToSpdlog(level));
}

void SetLogRank(int rank) { Logger().set_pattern(PatternOf(g_format, rank)); }

absl::Status ParseLogFormat(std::string_view name, LogFormat* format) {
  if (name == "text") {
    *format = LogFormat::kText;
  } else if (name == "json") {
    *format = LogFormat::kJson;
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("log format '", AbslView(name),
                     "' is unknown: it must be text or json"));
  }
  return absl::OkStatus();
}

absl::Status ParseLogLevel(std::string_view name, LogLevel* level) {
  constexpr std::pair<std::string_view, LogLevel> kLevels[] = {
      {"debug", LogLevel::kDebug},     {"info", LogLevel::kInfo},
      {"warning", LogLevel::kWarning}, {"error", LogLevel::kError},
      {"off", LogLevel::kOff},
  };
  for (const auto& [known, value] : kLevels) {
    if (name == known) {
      *level = value;
      return absl::OkStatus();
    }
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "log level '", AbslView(name),
      "' is unknown: it must be debug, info, warning, error or off"));
}

std::string Printable(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    const auto c = static_cast<unsigned char>(text[i]);
    // U+0080 to U+009F are control characters as well; in UTF-8 they are 0xc2
    // and one more byte.
    const auto next =
        i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0u;
    if (c == 0xc2 && next >= 0x80 && next <= 0x9f) {
      absl::StrAppend(&out, "\\u00", absl::Hex(next));
      ++i;
    } else if ((c < ' ' && c != '\n' && c != '\t') || c == 0x7f) {
      absl::StrAppend(&out, "\\x", absl::Hex(c, absl::kZeroPad2));
    } else {
      out.push_back(text[i]);
    }
  }
  return out;
}

std::string FormatLogEvent(LogFormat format, std::string_view message,
                           std::initializer_list<LogField> fields) {
  if (format == LogFormat::kJson) {
    nlohmann::ordered_json json;
    json["message"] = message;
    for (const LogField& field : fields) {
      std::visit(
          [&](const auto& value) { json[std::string(field.name())] = value; },
          field.value());
    }
    return Dump(json).substr(1);  // PatternOf has the opening brace
  }
  std::string line(message);
  for (const LogField& field : fields) {
    absl::StrAppend(&line, " ", AbslView(field.name()), "=",
                    TextValue(field.value()));
  }
  return line;
}

void Log(LogLevel level, std::string_view message,
         std::initializer_list<LogField> fields) {
  const spdlog::level::level_enum to = ToSpdlog(level);
  if (!Logger().should_log(to)) return;
  // Pass the event as an argument of "{}", so that braces in it are
  // not formatted.
  Logger().log(to, "{}", FormatLogEvent(g_format, message, fields));
}

}  // namespace kvasir::base
