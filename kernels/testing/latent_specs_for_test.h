// Specifications of layers for the tests of attention: every codec, groups,
// lifts and exact rows.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels/testing/latent_cache_for_test.h"

namespace kvasir::kernels {

inline PartSpec Numbers(std::vector<int64_t> widths,
                        DType dtype = DType::kBf16) {
  PartSpec part;
  part.widths = std::move(widths);
  part.dtype = dtype;
  return part;
}
inline PartSpec Codes(std::vector<int64_t> widths, std::vector<int> bits,
                      int64_t run_width = 0) {
  PartSpec part = Numbers(std::move(widths));
  part.bits = std::move(bits);
  part.run_width = run_width;
  return part;
}
inline PartSpec Fixed(PartSpec part) {
  part.fixed_ranges = true;
  return part;
}
// Returns the part with 0 bits for its last `channels` channels.
inline PartSpec Unstored(PartSpec part, int64_t channels) {
  part.fixed_ranges = true;
  part.unstored = channels;
  return part;
}
inline PartSpec Levels(PartSpec part) {
  part.levels = true;
  return part;
}
inline PartSpec Ranges(PartSpec part, DType param_dtype) {
  part.param_dtype = param_dtype;
  return part;
}
inline PartSpec Groups(PartSpec part, std::vector<int32_t> group_of_head) {
  part.group_of_head = std::move(group_of_head);
  return part;
}
inline PartSpec Rebuilt(PartSpec part, RebuildSpec rebuild) {
  part.rebuild = rebuild;
  return part;
}

inline PartSpec Lifted(PartSpec part, int64_t dims) {
  part.lift_dims = dims;
  return part;
}

inline LatentSpec SpecOf(std::vector<PartSpec> keys,
                         std::vector<PartSpec> values) {
  LatentSpec spec;
  spec.keys = std::move(keys);
  spec.values = std::move(values);
  return spec;
}

inline LatentSpec Exact(const char* name, int64_t key, int64_t value,
                        LatentSpec spec) {
  spec.name = name;
  spec.key_exact = key;
  spec.value_exact = value;
  return spec;
}

inline LatentSpec WithSinks(const char* name, int64_t sinks, LatentSpec spec) {
  spec.name = name;
  spec.sinks = sinks;
  return spec;
}

// The fields of each spec are: name, query heads, KV heads, keys, values,
// tokens per page, sliding window, causal, first position.
inline std::vector<LatentSpec> StoredSpecs() {
  const std::vector<int> schedule = {8, 4, 3, 2, 1};
  return {
      {"codes_4", 8, 2, {Codes({64}, {4})}, {Codes({64}, {4})}},
      {"codes_8", 4, 4, {Codes({32}, {8})}, {Codes({96}, {8})}, 32},
      {"codes_8_ragged", 4, 2, {Codes({40}, {8})}, {Codes({24}, {8})}, 32},
      {"codes_3", 4, 2, {Codes({96}, {3})}, {Codes({24}, {3})}, 64},
      {"codes_2_and_1", 4, 2, {Codes({160}, {2}, 32)}, {Codes({8}, {1})}},
      {"few_bits_few_rows",
       6,
       1,
       {Codes({96}, {3, 2, 1}, 32), Fixed(Codes({64}, {1}))},
       {Codes({64}, {3}), Codes({96}, {2, 1, 4}, 32), Fixed(Codes({64}, {3}))},
       64},
      {"codes_5_and_6", 6, 2, {Codes({96}, {5})}, {Codes({64}, {6})}},
      {"falling_bits",
       6,
       2,
       {Fixed(Codes({112}, {6, 5, 4, 3, 2, 1}, 16))},
       {Fixed(Codes({136}, {8, 6, 5, 4, 3, 2}, 24))},
       64},
      {"planes_in_turn",
       6,
       2,
       {Fixed(Codes({320}, {6, 3, 5, 2, 4, 1}, 8))},
       {Fixed(Codes({320}, {3, 6, 5, 3}, 32))}},
      {"unstored",
       4,
       2,
       {Unstored(Codes({160}, {6, 4}, 32), 40)},
       {Unstored(Codes({300}, {5, 2}, 64), 141)}},
      {"levels_4",
       6,
       2,
       {Levels(Codes({64}, {4}))},
       {Levels(Codes({64}, {4}))}},
      {"levels_of_few_bits",
       6,
       2,
       {Levels(Codes({96}, {3})), Levels(Codes({40}, {1}))},
       {Levels(Codes({96}, {2})), Levels(Codes({64}, {3})),
        Ranges(Levels(Codes({33}, {4})), DType::kF32)},
       64},
      {"narrow_runs", 4, 2, {Codes({300}, {4}, 7)}, {Codes({160}, {2}, 24)}},
      {"one_channel_runs",
       2,
       1,
       {Codes({24}, {4, 1}, 1)},
       {Codes({24}, {3}, 1)}},
      {"schedules",
       4,
       2,
       {Codes({160}, schedule, 32)},
       {Codes({300}, schedule, 60)},
       64},
      {"odd_schedules",
       4,
       2,
       {Codes({35}, schedule, 7)},
       {Codes({33}, {1, 3, 2}, 11)},
       32},
      {"bf16_ranges",
       4,
       2,
       {Ranges(Codes({64}, {4}, 32), DType::kBf16)},
       {Ranges(Codes({64}, {4}, 16), DType::kBf16)}},
      {"f32_ranges",
       4,
       2,
       {Ranges(Codes({64}, {3}, 32), DType::kF32)},
       {Ranges(Codes({64}, {2}), DType::kF32)}},
      {"static_ranges",
       4,
       2,
       {Fixed(Codes({64}, {4}))},
       {Fixed(Codes({96}, schedule, 24))}},
      {"static_wide",
       2,
       2,
       {Fixed(Codes({600}, {2}))},
       {Fixed(Codes({300}, {8}))}},
      // Some latents are shared by all heads, others belong to one head. A
      // slot's codes fill half a register, one register, or two registers.
      {"narrow_static_runs",
       9,
       3,
       {Fixed(Codes({64}, {6, 5, 3, 2, 1, 4}, 8))},
       {Groups(Unstored(Codes({192}, {6, 5, 4, 3, 2}, 8), 24), {0, 0, 0})},
       64},
      {"narrow_static_runs_of_a_head",
       24,
       3,
       {Fixed(Codes({64}, {5, 3, 2, 1}, 8))},
       {Fixed(Codes({64}, {6, 5, 4, 3}, 8)), Fixed(Codes({120}, {5, 3}, 8))},
       64},
      {"odd_static_runs",
       6,
       2,
       {Fixed(Codes({75}, {6, 3, 1, 5}, 7))},
       {Fixed(Codes({107}, {5, 1, 3, 6, 2}, 9)), Fixed(Codes({40}, {3, 5}, 1)),
        Fixed(Codes({200}, {2, 6, 1}, 25))}},
      {"groups",
       8,
       4,
       {Groups(Numbers({96, 24}), {0, 0, 1, 1})},
       {Groups(Codes({160, 8}, {4}, 32), {0, 1, 1, 0})}},
      {"all_heads",
       8,
       4,
       {Groups(Numbers({300}), {0, 0, 0, 0})},
       {Groups(Numbers({160}), {0, 0, 0, 0})}},
      {"keys_alone_values_shared",
       8,
       4,
       {Codes({24}, {4})},
       {Groups(Codes({96}, {3}), {0, 0, 1, 1})}},
      {"groups_in_no_order",
       4,
       4,
       {Groups(Codes({40}, {8}), {1, 0, 1, 0})},
       {Groups(Numbers({33}), {0, 1, 2, 0})}},
      {"wide",
       4,
       2,
       {Groups(Numbers({640}), {0, 0})},
       {Groups(Codes({520}, {4}, 64), {0, 0})}},
      {"two_parts",
       4,
       2,
       {Numbers({24}), Codes({40}, {4})},
       {Numbers({24}, DType::kF32), Codes({40}, {8}, 20)}},
      {"parts_of_unlike_groups",
       4,
       4,
       {Groups(Fixed(Codes({40}, {3})), {0, 0, 1, 1}), Numbers({8})},
       {Numbers({32}, DType::kF16)}},
      {"window", 4, 2, {Codes({64}, {4})}, {Codes({64}, {8})}, 16, 50},
      {"not_causal",
       4,
       2,
       {Codes({64}, {4})},
       {Codes({64}, {2})},
       16,
       0,
       false},
      {"many_heads", 70, 1, {Codes({16}, {4})}, {Codes({16}, {4})}},
      {"rebuilt",
       4,
       2,
       {Rebuilt(Groups(Numbers({160}), {0, 0}), {32, 16})},
       {Groups(Numbers({96}), {0, 0})}},
      {"rebuilt_partly_turned",
       6,
       2,
       {Rebuilt(Numbers({24}), {40, 8, true})},
       {Numbers({40})},
       32},
      {"rebuilt_unturned",
       4,
       2,
       {Rebuilt(Numbers({24}, DType::kF32), {20, 0, true})},
       {Numbers({24})}},
      {"rebuilt_far",
       4,
       2,
       {Rebuilt(Numbers({24}), {32, 16, false, false, false, 1.25f})},
       {Numbers({24})},
       16,
       0,
       true,
       131040},
      {"rebuilt_codes",
       4,
       2,
       {Rebuilt(Groups(Codes({96}, {4}, 32), {0, 0}), {32, 16, true})},
       {Codes({32}, {4})},
       16,
       0,
       true,
       500},
      {"rebuilt_wide_run",
       4,
       2,
       {Rebuilt(Codes({160}, {3}), {24, 12})},
       {Codes({32}, {4})}},
      {"rebuilt_many_runs",
       4,
       2,
       {Rebuilt(Codes({300}, {2, 4}, 4), {24, 12})},
       {Codes({32}, {4})}},
      {"rebuilt_static",
       4,
       2,
       {Rebuilt(Fixed(Codes({160}, schedule, 20)), {32, 16, true})},
       {Fixed(Codes({32}, {4}))}},
      {"rebuilt_head_of_256",
       2,
       1,
       {Rebuilt(Numbers({40}), {256, 128})},
       {Numbers({256})}},
      {"turned_as_stored",
       4,
       2,
       {Rebuilt(Numbers({32}), {32, 16, true, true})},
       {Numbers({32})}},
      {"turned_codes",
       4,
       2,
       {Rebuilt(Codes({40}, {4, 8}, 20), {40, 12, false, true, true})},
       {Numbers({32})}},
      {"turned_static",
       4,
       4,
       {Rebuilt(Fixed(Codes({40}, {4})), {40, 20, false, true, true})},
       {Numbers({32})}},
      {"rebuilt_beside_absorbed",
       4,
       2,
       {Numbers({24}), Rebuilt(Groups(Codes({40}, {8}), {0, 0}), {16, 8})},
       {Groups(Codes({40}, {4}), {0, 0})}},
  };
}

// Layers with lifted values: in every codec, with odd sizes, next to absorbed
// values, and with exact rows.
inline std::vector<LatentSpec> LiftedSpecs() {
  const std::vector<int> schedule = {8, 4, 3, 2, 1};
  std::vector<LatentSpec> specs = {
      {"lifted",
       8,
       4,
       {Rebuilt(Groups(Numbers({40}), {0, 0, 1, 1}), {16, 8})},
       {Lifted(Groups(Numbers({136, 24}), {0, 0, 1, 1}), 16)}},
      {"lifted_alone",
       4,
       2,
       {Numbers({24})},
       {Lifted(Numbers({33}, DType::kF32), 37)},
       32},
      {"lifted_codes",
       4,
       2,
       {Codes({64}, {4})},
       {Lifted(Groups(Codes({96}, {4}, 32), {0, 0}), 40)}},
      {"lifted_codes_8", 4, 1, {Numbers({24})}, {Lifted(Codes({40}, {8}), 5)}},
      {"lifted_wide_run",
       4,
       2,
       {Numbers({24})},
       {Lifted(Codes({300}, {3}), 16)}},
      {"lifted_schedule",
       4,
       2,
       {Codes({35}, schedule, 7)},
       {Lifted(Codes({160}, schedule, 20), 24)},
       64},
      {"lifted_many_runs",
       4,
       2,
       {Numbers({24})},
       {Lifted(Codes({67}, {1, 2}, 3), 33)}},
      {"lifted_static",
       4,
       2,
       {Fixed(Codes({40}, schedule, 20))},
       {Lifted(Groups(Fixed(Codes({160}, {4, 2}, 80)), {0, 0}), 16)}},
      {"lifted_head_of_256",
       2,
       1,
       {Rebuilt(Numbers({24}), {256, 128})},
       {Lifted(Codes({24}, {3}), 256)}},
      {"lifted_beside_absorbed",
       4,
       4,
       {Numbers({24}),
        Rebuilt(Groups(Codes({40}, {8}), {0, 1, 1, 0}), {16, 8})},
       {Groups(Codes({40}, {4}), {0, 0, 1, 1}),
        Lifted(Groups(Numbers({24}), {0, 1, 0, 1}), 17),
        Lifted(Fixed(Codes({24}, {1})), 16)}},
      {"lifted_not_causal",
       4,
       2,
       {Codes({64}, {4})},
       {Lifted(Codes({64}, {2}), 24)},
       16,
       30,
       false}};
  for (size_t i : {0, 2, 5, 7, 9}) {
    static const char* const kNames[] = {"exact_lifted",
                                         "",
                                         "exact_lifted_codes",
                                         "",
                                         "",
                                         "exact_lifted_schedule",
                                         "",
                                         "exact_lifted_static",
                                         "",
                                         "exact_lifted_beside_absorbed"};
    specs.push_back(
        Exact(kNames[i], 70, 30 + 5 * static_cast<int64_t>(i), specs[i]));
  }
  return specs;
}

// Layers with exact windows of 1, 7 and 64 slots, and of more slots than a
// sequence has. Both the keys and the values have such a window, or only one
// of them.
inline std::vector<LatentSpec> ExactSpecs() {
  const std::vector<int> schedule = {8, 4, 3, 2, 1};
  const LatentSpec codes = {"", 8, 2, {Codes({64}, {4})}, {Codes({96}, {3})}};
  const LatentSpec fixed = {
      "", 4, 2, {Fixed(Codes({64}, {4}))}, {Fixed(Codes({96}, schedule, 24))}};
  const LatentSpec rebuilt = {
      "",
      4,
      2,
      {Rebuilt(Groups(Codes({96}, {4}, 32), {0, 0}), {32, 16, true})},
      {Codes({32}, {8})},
      16,
      0,
      true,
      500};
  LatentSpec narrow = codes;
  narrow.window = 50;
  LatentSpec ahead = codes;
  ahead.causal = false;
  return {
      Exact("exact_1", 1, 1, codes),
      Exact("exact_7", 7, 7, codes),
      Exact("exact_64", 64, 64, codes),
      Exact("exact_all", 5000, 5000, codes),
      Exact("exact_unlike", 100, 3, codes),
      Exact("exact_keys", 64, 0, codes),
      Exact("exact_values", 0, 64, codes),
      Exact("exact_behind_a_window", 20, 80, narrow),
      Exact("exact_not_causal", 9, 30, ahead),
      Exact("exact_static", 64, 64, fixed),
      Exact("exact_static_1", 1, 1, fixed),
      Exact("exact_static_all", 5000, 5000, fixed),
      Exact("exact_static_unlike", 3, 700, fixed),
      Exact("exact_rebuilt", 64, 7, rebuilt),
      Exact("exact_rebuilt_all", 5000, 7, rebuilt),
      Exact("exact_rebuilt_static", 70, 70,
            {"",
             4,
             2,
             {Rebuilt(Fixed(Codes({160}, schedule, 20)), {32, 16, true})},
             {Fixed(Codes({32}, {4}))}}),
      Exact("exact_turned", 70, 70,
            {"",
             4,
             2,
             {Rebuilt(Codes({40}, {4, 8}, 20), {40, 12, false, true, true})},
             {Numbers({32}), Codes({40}, {2})}}),
      Exact("exact_parts", 30, 65,
            {"",
             4,
             4,
             {Groups(Fixed(Codes({40}, {3})), {0, 0, 1, 1}),
              Rebuilt(Groups(Codes({24}, {8}), {0, 1, 1, 0}), {16, 8}),
              Numbers({8}, DType::kF32)},
             {Groups(Codes({33, 24}, {1, 3, 2}, 11), {0, 1, 2, 0}),
              Fixed(Codes({40}, {8}, 20))}}),
      Exact("exact_wide", 64, 64,
            {"",
             4,
             2,
             {Groups(Fixed(Codes({640}, {2})), {0, 0})},
             {Groups(Codes({520}, {4}, 64), {0, 0})}}),
      Exact("exact_many_heads", 64, 64,
            {"", 70, 1, {Codes({16}, {4})}, {Codes({16}, {4})}}),
  };
}

// Layers with exact sinks (the first tokens of a sequence), with and without
// exact windows or sliding windows. There are fewer sinks than a block of
// slots, more than a block, or more than the sequence has.
inline std::vector<LatentSpec> SinkSpecs() {
  std::vector<LatentSpec> specs;
  const std::vector<LatentSpec> exact = ExactSpecs();
  const auto add = [&](const std::string& from, const char* name,
                       int64_t sinks) {
    const auto spec =
        std::find_if(exact.begin(), exact.end(),
                     [&](const LatentSpec& each) { return from == each.name; });
    specs.push_back(WithSinks(name, sinks, *spec));
  };
  const auto alone = [&](const char* name, int64_t sinks) {
    LatentSpec& spec = specs.back();
    specs.push_back(WithSinks(name, sinks, Exact(name, 0, 0, spec)));
  };
  add("exact_7", "sinks_4", 4);
  alone("sinks_alone", 4);
  alone("sinks_70_alone", 70);
  alone("sinks_all_alone", 5000);
  add("exact_64", "sinks_1", 1);
  add("exact_64", "sinks_64", 64);
  add("exact_unlike", "sinks_100_unlike", 100);
  add("exact_keys", "sinks_window_of_keys", 3);
  add("exact_values", "sinks_window_of_values", 3);
  add("exact_all", "sinks_in_the_window", 9);
  add("exact_behind_a_window", "sinks_behind_a_window", 8);
  add("exact_not_causal", "sinks_not_causal", 5);
  add("exact_static", "sinks_static", 4);
  alone("sinks_static_alone", 4);
  add("exact_static_unlike", "sinks_static_unlike", 130);
  add("exact_rebuilt", "sinks_rebuilt", 4);
  alone("sinks_rebuilt_alone", 20);
  add("exact_rebuilt_static", "sinks_rebuilt_static", 33);
  add("exact_turned", "sinks_turned", 2);
  add("exact_parts", "sinks_parts", 65);
  add("exact_wide", "sinks_wide", 4);
  add("exact_many_heads", "sinks_many_heads", 4);
  const auto keep = [&](const char* name, int64_t sinks, int64_t window,
                        const PartSpec& key, const PartSpec& value) {
    specs.push_back(WithSinks(
        name, sinks, Exact(name, window, window, {"", 4, 2, {key}, {value}})));
  };
  const PartSpec few = Unstored(Codes({96}, {6, 5, 2}, 24), 24);
  keep("sinks_unstored", 4, 30, few, few);
  keep("sinks_unstored_alone", 4, 0, Rebuilt(few, {32, 16, true}), few);
  keep("sinks_levels", 4, 30, Levels(Codes({64}, {4})),
       Levels(Codes({64}, {3})));
  keep("sinks_levels_alone", 70, 0, Levels(Codes({64}, {4})),
       Levels(Codes({64}, {4})));
  for (const LatentSpec& lifted : LiftedSpecs()) {
    if (lifted.name == std::string("exact_lifted_codes")) {
      specs.push_back(WithSinks("sinks_lifted_codes", 5, lifted));
      alone("sinks_lifted_codes_alone", 5);
    } else if (lifted.name == std::string("exact_lifted_static")) {
      specs.push_back(WithSinks("sinks_lifted_static", 40, lifted));
    }
  }
  return specs;
}

inline std::vector<LatentSpec> Specs() {
  std::vector<LatentSpec> specs = StoredSpecs();
  for (LatentSpec& spec : ExactSpecs()) specs.push_back(std::move(spec));
  for (LatentSpec& spec : SinkSpecs()) specs.push_back(std::move(spec));
  for (LatentSpec& spec : LiftedSpecs()) specs.push_back(std::move(spec));
  return specs;
}

// A layer with codes, unquantized numbers, groups of heads and rebuilt keys.
// With this many heads, the launch for a long prompt is divided by head, but
// the launch for a short one is not, so tests cover both.
inline LatentSpec Mixed() {
  LatentSpec spec;
  spec.num_heads = 16;
  spec.num_kv_heads = 4;
  spec.keys = {Rebuilt(Groups(Codes({40}, {4}, 20), {0, 0, 1, 1}), {16, 8}),
               Codes({24}, {3})};
  spec.values = {Groups(Codes({96}, {4}, 48), {0, 0, 1, 1})};
  return spec;
}

inline LatentSpec MixedExact(int64_t key, int64_t value) {
  LatentSpec spec = Exact("", key, value, Mixed());
  spec.values.push_back(Fixed(Codes({24}, {2})));
  return spec;
}

}  // namespace kvasir::kernels
