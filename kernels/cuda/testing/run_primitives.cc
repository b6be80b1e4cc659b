// This file is compiled twice: for the emulator and for the GPU
// (KVASIR_PRIMITIVES_TARGET).
#include "kernels/cuda/testing/run_primitives.h"

#include <bit>
#include <random>

#include "base/status_matchers.h"
#include "kernels/device/dtype.h"
#include "kernels/device/read_back.h"
#include "kernels/emulation/testing/primitive_kernels.h"

namespace kvasir::kernels::KVASIR_PRIMITIVES_TARGET {
namespace {

using Words = std::vector<uint32_t>;

Words RandomWords(size_t count, uint32_t seed) {
  std::mt19937 engine(seed);
  Words words(count);
  for (uint32_t& word : words) word = static_cast<uint32_t>(engine());
  return words;
}
// Makes pairs of fp16 numbers that are also finite if read as bf16.
Words RandomPairs(size_t count, uint32_t seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  const auto half = [&] {
    return static_cast<uint32_t>(FromFloat<F16>(normal(engine)).bits);
  };
  Words words(count);
  for (uint32_t& word : words) word = half() | half() << 16;
  return words;
}
Words RandomBf16Pairs(size_t count, uint32_t seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  const auto half = [&] {
    return static_cast<uint32_t>(FromFloat<Bf16>(normal(engine)).bits);
  };
  Words words(count);
  for (uint32_t& word : words) word = half() | half() << 16;
  return words;
}
Words WholeFloats(size_t count) {
  Words words(count);
  for (size_t i = 0; i < count; ++i) {
    words[i] = std::bit_cast<uint32_t>(static_cast<float>(i % 101) - 40.0f);
  }
  return words;
}

class Runner {
 public:
  explicit Runner(Device* device)
      : device_(device), stream_(device->MakeStream()) {}

  // Calls launch(args, launcher), and returns the `out_words` words and then
  // the `more_words` words that the kernel wrote.
  template <typename Launch>
  Words Run(const Words& in, size_t out_words, size_t more_words,
            uint32_t count, const Launch& launch) {
    const DeviceBuffer in_memory = Put(in);
    const DeviceBuffer out = Put(Words(out_words, 0));
    const DeviceBuffer more = Put(Words(more_words, 0));
    PrimitiveArgs args;
    args.in = in_memory.as<uint32_t>().device_address();
    args.out = out.as<uint32_t>().device_address();
    args.more = more.as<uint32_t>().device_address();
    args.count = count;
    launch(args, static_cast<LaunchStream&>(*stream_).launcher());
    KVASIR_EXPECT_OK(static_cast<LaunchStream&>(*stream_).TakeLaunchError());
    Words words = Get(out);
    const Words others = Get(more);
    words.insert(words.end(), others.begin(), others.end());
    return words;
  }

 private:
  DeviceBuffer Put(const Words& words) {
    const size_t bytes = words.size() * sizeof(uint32_t);
    auto memory = device_->allocator().Allocate(bytes, MemoryTag::kOther);
    KVASIR_EXPECT_OK(memory.status());
    KVASIR_EXPECT_OK(device_->Write(memory->data(), words.data(), bytes));
    return *std::move(memory);
  }
  Words Get(const DeviceBuffer& memory) {
    Words words(memory.bytes() / sizeof(uint32_t));
    KVASIR_EXPECT_OK(
        ReadBack(*stream_, words.data(), memory.data(), memory.bytes()));
    return words;
  }

  Device* const device_;
  const std::unique_ptr<Stream> stream_;
};

}  // namespace

std::vector<PrimitiveRun> RunPrimitives(Device& device, bool bulk_copies) {
  Runner runner(&device);
  std::vector<PrimitiveRun> runs;
  const auto add = [&](const char* name, Words words, float tolerance = 0.0f) {
    runs.push_back({name, std::move(words), tolerance});
  };
  add("indices", runner.Run({0}, size_t{3} * 2 * 64, 0, 0,
                            [](const PrimitiveArgs& args, Launcher& launcher) {
                              LaunchIndices(args, 3, 2, 64, launcher);
                            }));
  add("warp",
      runner.Run(RandomPairs(32, 1), size_t{32} * 16, 0, 0, LaunchWarp));
  add("barriers", runner.Run(RandomWords(64, 2), 64, 0, 0, LaunchBarriers));
  add("copies", runner.Run(RandomWords(224, 3), 224, 0, 0, LaunchCopies));
  if (bulk_copies) {
    add("bulk_copies", runner.Run(RandomWords(size_t{256} * 5, 4),
                                  size_t{256} * 5, 0, 5, LaunchBulkCopies));
  }
  for (const bool bf16 : {false, true}) {
    const Words in = bf16 ? RandomBf16Pairs(192, 5) : RandomPairs(192, 5);
    add(bf16 ? "mma of bf16" : "mma of fp16",
        runner.Run(in, 128, 0, 0,
                   [bf16](const PrimitiveArgs& args, Launcher& launcher) {
                     LaunchMma(args, bf16, launcher);
                   }),
        // The tolerance is needed because a GPU truncates each term to the
        // precision of the largest one, while the emulator rounds only the sum.
        1e-4f);
  }
  add("matrices", runner.Run(RandomWords(128, 6), size_t{2} * 7 * 32, 0, 0,
                             LaunchMatrices));
  add("atomics", runner.Run({0}, 6, 11, 0,
                            [](const PrimitiveArgs& args, Launcher& launcher) {
                              LaunchAtomics(args, 11, launcher);
                            }));
  add("hand_over",
      runner.Run(RandomWords(64, 7), 64, 16 + 64, 0, LaunchHandOver));

  constexpr uint32_t kTriples = 300;
  Words triples = RandomPairs(size_t{3} * kTriples, 8);
  // The first number of each triple is made non-negative, because the kernel
  // computes its square root.
  for (size_t i = 0; i < triples.size(); i += 3) triples[i] &= 0x7fffffffu;
  const Words numbers = runner.Run(triples, size_t{kTriples} * kNumberWords, 0,
                                   kTriples, LaunchNumbers);
  Words exact, powers;
  for (size_t i = 0; i < numbers.size(); ++i) {
    (i % kNumberWords == 11 ? powers : exact).push_back(numbers[i]);
  }
  add("numbers", std::move(exact));
  add("exp2", std::move(powers), 2.4e-7f);
  constexpr uint32_t kCtas = 5;
  constexpr uint32_t kCount = 64 * 7;
  add("grid_sum",
      runner.Run(WholeFloats(size_t{kCtas} * kCount), 1, 1 + kCtas, kCount,
                 [](const PrimitiveArgs& args, Launcher& launcher) {
                   LaunchGridSum(args, kCtas, launcher);
                 }));
  return runs;
}

}  // namespace kvasir::kernels::KVASIR_PRIMITIVES_TARGET
