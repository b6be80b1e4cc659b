#include "worker/executor/pages/kv_arenas.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "kernels/device/allocator.h"
#include "worker/testing/plan_cases.h"
#include "worker/testing/tiny_rank.h"

namespace kvasir::worker {
namespace {

// Plans of every method, and a plan with two page groups. One of its groups
// evicts, and keeps different numbers of exact keys and values.
std::vector<PlanCase> ArenaCases() {
  std::vector<PlanCase> cases = PlanCases();
  PlanCase& two_groups = cases.emplace_back();
  two_groups.name = "TwoPageGroups";
  two_groups.key = plan_cases::Full(
      "POST_ROPE", plan_cases::Codes("4", R"("channel_static":{})"));
  two_groups.value = plan_cases::Full(
      "NO_ROPE", plan_cases::Codes("1", R"("channel_static":{})"));
  two_groups.codes = true;
  two_groups.key_exact = 9;
  two_groups.value_exact = 13;
  two_groups.sinks = 2;
  two_groups.first_whole = true;
  two_groups.eviction =
      R"({"budget":30,"sinks":2,"recent":13,"every_tokens":8,)"
      R"("lambda":1,"positions":"ORIGINAL"})";
  return cases;
}

class KvArenasTest : public ::testing::TestWithParam<PlanCase> {
 protected:
  KvArenasTest() {
    model::ModelShape shape = TinyShape();
    shape.num_layers = 3;
    auto rank =
        MakePlannedRank(GetParam(), TinyOptions(), nullptr, "BF16", shape);
    KVASIR_EXPECT_OK(rank);
    rank_ = *std::move(rank);
  }
  const KvArenas& arenas() const { return rank_->executor().arenas(); }

  std::unique_ptr<Rank> rank_;
};

TEST_P(KvArenasTest, BytesPerPageAndPerTokenMatchTheAllocatedMemory) {
  int64_t bytes = 0;
  int64_t page_bytes = 0;
  for (int64_t group = 0; group < arenas().num_page_groups(); ++group) {
    bytes += arenas().page_bytes(group) *
             arenas().num_pages()[static_cast<size_t>(group)];
    page_bytes += arenas().page_bytes(group);
  }
  EXPECT_EQ(bytes, rank_->allocator().use(kernels::MemoryTag::kKvCache).bytes);
  EXPECT_DOUBLE_EQ(arenas().bytes_per_token() *
                       static_cast<double>(rank_->layout().page_tokens()),
                   static_cast<double>(page_bytes));
}

// Computes the addresses at which ops find exact rows, and checks that each row
// lies within one side page and that rows do not overlap.
TEST_P(KvArenasTest, ExactRowsLieInSidePagesAndDoNotOverlap) {
  struct Bytes {
    int64_t begin;
    int64_t end;
  };
  std::vector<Bytes> side_pages;
  std::vector<std::vector<int32_t>> ids;  // by page group
  for (const cache::PageGroupLayout& group : rank_->layout().page_groups()) {
    const int64_t count =
        arenas().num_pages()[static_cast<size_t>(group.id.value())];
    std::vector<int32_t>& own = ids.emplace_back();
    for (int64_t i = 0; i < group.side_pages_per_sequence; ++i) {
      own.push_back(static_cast<int32_t>(count - 1 - 2 * i));
    }
    ASSERT_TRUE(own.empty() || own.back() >= 0);
  }
  const auto address = [](kernels::DevicePtr<const void> pointer) {
    return static_cast<int64_t>(
        reinterpret_cast<uintptr_t>(pointer.device_address()));
  };
  std::vector<Bytes> rows;
  for (const KvArenas::Layer& layer : arenas().layers()) {
    const auto& own = ids[static_cast<size_t>(layer.page_group)];
    const kernels::LatentPart& latents = layer.key.front().latents;
    for (const int32_t page : own) {
      const int64_t begin = address(latents.arena) + page * latents.page_bytes;
      side_pages.push_back({begin, begin + latents.page_bytes});
    }
    for (const auto& [ring, parts] :
         {std::pair(layer.key_ring, &layer.key),
          std::pair(layer.value_ring, &layer.value)}) {
      if (ring < 0 || parts->front().of_keys) continue;
      const kernels::ExactSlots slots =
          arenas().rings()[static_cast<size_t>(ring)].slots();
      const int64_t arena = address(parts->front().exact.arena);
      for (int64_t row = 0; row < slots.sinks + slots.ring_rows; ++row) {
        const auto place = slots.PlaceOfRow(row, own.data());
        const int64_t begin = arena + place.offset_bytes;
        EXPECT_LE(begin + slots.row_bytes, arena + place.end_bytes);
        rows.push_back({begin, begin + slots.row_bytes});
      }
    }
  }
  for (const Bytes& row : rows) {
    EXPECT_EQ(std::count_if(side_pages.begin(), side_pages.end(),
                            [&](const Bytes& page) {
                              return page.begin <= row.begin &&
                                     row.end <= page.end;
                            }),
              1);
  }
  std::sort(rows.begin(), rows.end(),
            [](const Bytes& a, const Bytes& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < rows.size(); ++i) {
    EXPECT_GE(rows[i].begin, rows[i - 1].end);
  }
  const PlanCase& plan = GetParam();
  const bool any = plan.key_exact + plan.value_exact + plan.sinks > 0;
  EXPECT_EQ(rows.empty(), !any);
}

INSTANTIATE_TEST_SUITE_P(Methods, KvArenasTest,
                         ::testing::ValuesIn(ArenaCases()),
                         [](const auto& parameter) {
                           return parameter.param.name;
                         });

}  // namespace
}  // namespace kvasir::worker
