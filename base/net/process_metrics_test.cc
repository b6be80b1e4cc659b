#include "base/net/process_metrics.h"

#include <sys/resource.h>

#include <fstream>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_matchers.h"

namespace kvasir::base {
namespace {

using ::testing::AllOf;
using ::testing::Ge;
using ::testing::HasSubstr;
using ::testing::Le;

// Fields 3 to 24 of /proc/PID/stat. The fields that ParseProcessStat uses have
// distinct values.
constexpr char kFields[] =
    "S 1 1 1 0 -1 4194560 100 0 0 0 70 30 0 0 20 0 7 0 500 8192 3";

TEST(ProcessStatTest, ReadsCpuTimeThreadCountStartTimeAndMemory) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const ProcessStat stat,
      ParseProcessStat(absl::StrCat("42 (kvasir) ", kFields, " 0 0\n")));
  EXPECT_EQ(stat.cpu_ticks, 100);
  EXPECT_EQ(stat.threads, 7);
  EXPECT_EQ(stat.start_ticks, 500);
  EXPECT_EQ(stat.virtual_bytes, 8192);
  EXPECT_EQ(stat.resident_pages, 3);
}

TEST(ProcessStatTest, AProgramNameWithParenthesesAndSpacesIsParsed) {
  KVASIR_ASSERT_OK_AND_ASSIGN(
      const ProcessStat stat,
      ParseProcessStat(absl::StrCat("42 (a) S 9) ", kFields)));
  EXPECT_EQ(stat.cpu_ticks, 100);
  EXPECT_EQ(stat.resident_pages, 3);
}

TEST(ProcessStatTest, TheErrorForAMissingFieldHasTheFieldsNumber) {
  EXPECT_THAT(ParseProcessStat(""), StatusIs(absl::StatusCode::kInternal,
                                             HasSubstr("no program name")));
  EXPECT_THAT(ParseProcessStat("42 (kvasir) S 1 1"),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("field 14")));
  EXPECT_THAT(
      ParseProcessStat(
          "42 (kvasir) S 1 1 1 0 -1 4194560 100 0 0 0 70 30 0 0 20 0 x 0 500"),
      StatusIs(absl::StatusCode::kInternal, HasSubstr("field 20")));
}

std::map<std::string, double> Exported() {
  std::map<std::string, double> values;
  for (const prometheus::MetricFamily& family : ProcessMetrics().Collect()) {
    values[family.name] = family.type == prometheus::MetricType::Counter
                              ? family.metric.at(0).counter.value
                              : family.metric.at(0).gauge.value;
  }
  return values;
}

TEST(ProcessMetricsTest, ReportsTheMetricsOfThisProcess) {
  const std::map<std::string, double> values = Exported();
  EXPECT_EQ(values.size(), 7);
  EXPECT_GE(values.at("process_cpu_seconds_total"), 0);
  EXPECT_GT(values.at("process_resident_memory_bytes"), 1 << 20);
  EXPECT_GT(values.at("process_virtual_memory_bytes"),
            values.at("process_resident_memory_bytes"));
  EXPECT_GE(values.at("process_threads"), 1);
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_EQ(values.at("process_max_fds"), static_cast<double>(limit.rlim_cur));
  // The kernel reports the machine's start in whole seconds.
  const double now = absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch());
  EXPECT_THAT(values.at("process_start_time_seconds"),
              AllOf(Ge(now - 3600), Le(now + 2)));
}

TEST(ProcessMetricsTest, CountsOpenFiles) {
  const double before = Exported().at("process_open_fds");
  const std::ifstream file("/proc/self/stat");
  ASSERT_TRUE(file.is_open());
  EXPECT_EQ(Exported().at("process_open_fds"), before + 1);
}

}  // namespace
}  // namespace kvasir::base
