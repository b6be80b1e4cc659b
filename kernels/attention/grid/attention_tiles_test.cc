#include "kernels/attention/grid/attention_tiles.h"

#include <set>

#include "kernels/testing/latent_cache_for_test.h"

namespace kvasir::kernels {
namespace {

// Returns the number of slots that a launch's units read for query head 0.
int64_t SlotsOfUnits(const PagedAttentionArgs& params) {
  const AttentionGrid grid(params);
  UnitCursor cursor(grid);
  AttentionUnit unit;
  int64_t slots = 0;
  for (int64_t index = 0; cursor.MoveTo(index, &unit); ++index) {
    const int64_t* heads = grid.heads() + unit.slice->first_head;
    if (std::count(heads, heads + unit.slice->num_heads, 0) == 0) continue;
    const VisibleRange range = UnitSlots(params, unit);
    slots += range.end - range.begin;
  }
  return slots;
}

// Returns the cost of rebuilding keys in all units of a launch, if a slot costs
// j + 1 for KV head j (kHeadWork).
double WorkOfUnits(const PagedAttentionArgs& params) {
  const AttentionGrid grid(params);
  UnitCursor cursor(grid);
  AttentionUnit unit;
  double work = 0;
  for (int64_t index = 0; cursor.MoveTo(index, &unit); ++index) {
    const VisibleRange range = UnitSlots(params, unit);
    const int64_t* heads = grid.heads() + unit.slice->first_head;
    std::set<int64_t> kv_heads;
    for (int64_t i = 0; i < unit.slice->num_heads; ++i) {
      kv_heads.insert(heads[i] / grid.heads_per_kv());
    }
    for (const int64_t j : kv_heads) {
      work += static_cast<double>((range.end - range.begin) * (j + 1));
    }
  }
  return work;
}

constexpr double kHeadWork[] = {1, 2, 3, 4};

LatentSpec Spec(RebuildSpec rebuild, std::vector<int32_t> groups) {
  LatentSpec spec;
  spec.num_heads = 8;
  spec.num_kv_heads = 4;
  spec.keys[0].rebuild = rebuild;
  spec.keys[0].widths = {96};
  spec.keys[0].group_of_head = groups;
  spec.values[0].widths = {512};
  spec.values[0].group_of_head = groups;
  spec.tables_only = true;
  return spec;
}

TEST(AttentionTilesTest,
     ThePredictedReadsAndWorkOfALaunchEqualTheSumOverItsWorkUnits) {
  const RebuildSpec whole = {.dims = 64, .num_pairs = 32};
  for (const int64_t window : {0, 100}) {
    for (const LatentSpec& each :
         {Spec(whole, {0, 1, 2, 3}), Spec(whole, {0, 0, 1, 1}),
          Spec(whole, {0, 0, 0, 0}), Spec({}, {})}) {
      LatentSpec spec = each;
      spec.window = window;
      LatentCache cache(spec, {1}, 4);
      PagedAttentionArgs params = cache.Params();
      for (const AttentionSequence& sequence :
           {AttentionSequence{.num_rows = 1, .first_slot = 0},
            AttentionSequence{.num_rows = 1, .first_slot = 999},
            AttentionSequence{.num_rows = 65, .first_slot = 0},
            AttentionSequence{.num_rows = 512, .first_slot = 300}}) {
        params.sequences = &sequence;
        params.num_sequences = 1;
        EXPECT_EQ(SlotsReadByTiles(AttentionGrid(params), sequence),
                  SlotsOfUnits(params))
            << window << " " << sequence.num_rows;
        EXPECT_EQ(WorkOnTiles(AttentionGrid(params), sequence, kHeadWork),
                  WorkOfUnits(params))
            << window << " " << sequence.num_rows;
      }
    }
  }
}

TEST(AttentionGridTest,
     APromptIsDividedIntoMoreWorkUnitsIfThereAreMoreThreadsThanHeads) {
  LatentCache cache(Spec({.dims = 64, .num_pairs = 32}, {0, 1, 2, 3}), {1}, 4);
  PagedAttentionArgs params = cache.Params();
  const AttentionSequence sequence = {.num_rows = 600};
  params.sequences = &sequence;
  params.num_sequences = 1;
  const auto units = [&](int threads) {
    const AttentionGrid grid(params, threads);
    UnitCursor cursor(grid);
    AttentionUnit unit;
    int64_t count = 0;
    int64_t rows = 0;
    for (; cursor.MoveTo(count, &unit); ++count) {
      int64_t panel_rows = 0;
      for (int64_t i = 0; i < grid.PanelsOf(unit); ++i) {
        const AttentionUnit panel = grid.PanelOf(unit, i);
        EXPECT_EQ(panel.query_begin * unit.slice->num_heads,
                  unit.query_begin * unit.slice->num_heads + panel_rows);
        EXPECT_LE(panel.rows(), kAttentionMaxRows);
        panel_rows += panel.rows();
      }
      EXPECT_EQ(panel_rows, unit.rows());
      rows += unit.rows();
    }
    EXPECT_EQ(rows, 600 * params.num_heads);
    return count;
  };
  const int64_t fewest = units(1);
  EXPECT_EQ(fewest, units(2));
  EXPECT_EQ(fewest, units(4));
  EXPECT_LT(fewest, units(32));
  // There cannot be more units than panels, so more threads do not help.
  EXPECT_EQ(units(1000), units(2000));
}

// Layers share one AttentionStep if DividesAs says that their grids are alike.
// So it must return false for grids of different shapes.
TEST(AttentionGridTest,
     OnlyLayersOfTheSameShapeDivideAStepIntoTheSameWorkUnits) {
  const LatentSpec spec = Spec({.dims = 64, .num_pairs = 32}, {0, 0, 1, 1});
  LatentCache one(spec, {1}, 4);
  LatentCache other(spec, {1}, 9);
  const PagedAttentionArgs params = one.Params();
  const PagedAttentionArgs like = other.Params();
  EXPECT_TRUE(AttentionGrid(params, 2).DividesAs(AttentionGrid(like, 2)));
  EXPECT_FALSE(AttentionGrid(params, 2).DividesAs(AttentionGrid(like, 3)));
  LatentSpec evicts = spec;
  evicts.adds_mass = true;
  evicts.unit_of_head = {0, 0, 1, 1};
  LatentCache mass(evicts, {1}, 4);
  const PagedAttentionArgs adds = mass.Params();
  EXPECT_TRUE(AttentionGrid(params, 2).DividesAs(AttentionGrid(adds, 2)));
  LatentSpec window = spec;
  window.window = 100;
  LatentCache windowed(window, {1}, 4);
  const PagedAttentionArgs apart = windowed.Params();
  EXPECT_FALSE(AttentionGrid(params, 2).DividesAs(AttentionGrid(apart, 2)));
  LatentSpec more = spec;
  more.num_heads = 16;
  LatentCache alone(more, {1}, 4);
  const PagedAttentionArgs heads = alone.Params();
  EXPECT_FALSE(AttentionGrid(params, 2).DividesAs(AttentionGrid(heads, 2)));
}

TEST(AttentionTilesTest,
     APrefillChunkReadsASlotMoreThanOnceButFarLessThanOncePerToken) {
  LatentCache cache(Spec({.dims = 64, .num_pairs = 32}, {0, 0, 0, 0}), {1}, 4);
  const PagedAttentionArgs params = cache.Params();
  const AttentionGrid grid(params);
  EXPECT_EQ(SlotsReadByTiles(grid, {.num_rows = 1, .first_slot = 999}), 1000);
  const int64_t chunk =
      SlotsReadByTiles(grid, {.num_rows = 1000, .first_slot = 0});
  EXPECT_GT(chunk, 1000);
  EXPECT_LT(chunk, 1000 * 1000 / 2 / 10);
}

// Each KV head has 200 query heads. They are more than the rows of a panel, so
// they are divided into several slices.
TEST(AttentionTilesTest, KeysAreRebuiltOncePerSliceOfTheQueryHeadsOfAKvHead) {
  LatentSpec spec = Spec({.dims = 64, .num_pairs = 32}, {0, 0});
  spec.num_heads = 400;
  spec.num_kv_heads = 2;
  LatentCache cache(spec, {1}, 4);
  PagedAttentionArgs params = cache.Params();
  const AttentionSequence sequence = {.num_rows = 1, .first_slot = 999};
  params.sequences = &sequence;
  params.num_sequences = 1;
  const AttentionGrid grid(params);
  EXPECT_EQ(SlotsReadByTiles(grid, sequence), 1000);
  const double work = WorkOnTiles(grid, sequence, kHeadWork);
  EXPECT_EQ(work, WorkOfUnits(params));
  EXPECT_GE(work, 2 * 1000 * (1 + 2));
}

}  // namespace
}  // namespace kvasir::kernels
