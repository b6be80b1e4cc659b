// Loads the latents of a block of 64 slots into a tile that fits into the CPU's
// cache. Keys are transposed, so that neighbouring slots are adjacent; values
// keep their order. Codes are converted to float32 or stay packed; their ranges
// are not applied. For inclusion by *_cpu.cc.
#if defined(KVASIR_KERNELS_LATENT_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVASIR_KERNELS_LATENT_TILE_INL_H_
#undef KVASIR_KERNELS_LATENT_TILE_INL_H_
#else
#define KVASIR_KERNELS_LATENT_TILE_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/attention/grid/attention_grid.h"
#include "kernels/attention/grid/exact_rows.h"
#include "kernels/simd/ahead_lines.h"
#include "kernels/simd/codes-inl.h"
#include "kernels/simd/simd-inl.h"
#include "kernels/simd/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {

inline constexpr int64_t kBlock = kAttentionBlockSlots;

// Zeros, which are read in place of slots that no row sees.
alignas(64) inline constexpr char kNoSlot[kChunkChannels * 4 + 64] = {};

// The addresses of a block's slots. Only slots [begin, end) are read.
struct BlockSlots {
  int64_t begin = 0;  // counted from the block's start
  int64_t end = 0;
  // True if all 64 slots are read and the kVecLanes slots of each vector are
  // contiguous in one page.
  bool regular = false;
  // How many bytes may be read from the start of any of the slots.
  int64_t room = 0;
  const char* codes[kBlock];
  const char* ranges[kBlock];
  const char* readable[kBlock];  // end of the page that holds the slot
};

// ----- Keys: a vector has one channel of several slots.

// The most 32-bit words per slot that hold a chunk's codes. 128 channels of 8
// bits take 32 words. Each of the four planes of codes (LatentPartIn) may begin
// inside a word and so take one more, and is padded to a whole vector of words.
inline constexpr int64_t kMaxWords = 32 + 4 * (1 + kLanes);

#if HWY_TARGET <= HWY_AVX3
// Like LoadWords, for at most eight words of each of 16 slots: the words of two
// slots fit into one vector.
HWY_INLINE void LoadFewWords(const char* const* rows, int64_t offset,
                             uint32_t* words, int64_t stride) {
  const hn::Half<Words> half;
  const auto load = [&](int slot) {
    return hn::LoadU(half,
                     reinterpret_cast<const uint32_t*>(rows[slot] + offset));
  };
  WordVec lanes[8];
  for (int i = 0; i < 8; ++i) {
    lanes[i] = hn::Combine(kWords, load(i + 8), load(i));
  }
  TransposeBlocksOf4(lanes);
  TransposeBlocksOf4(lanes + 4);
  // Each 128-bit block of lanes[4 i + j], where j < 4, now has one word of each
  // of four slots. Blocks 0 and 1 have words j and 4 + j of slots 4 i to
  // 4 i + 3. Blocks 2 and 3 have the same words of the slots 8 further on.
  for (int j = 0; j < 4; ++j) {
    const WordVec first = lanes[j];
    const WordVec second = lanes[4 + j];
    hn::StoreU(hn::OddEvenBlocks(hn::SwapAdjacentBlocks(second), first), kWords,
               words + j * stride);
    hn::StoreU(hn::OddEvenBlocks(second, hn::SwapAdjacentBlocks(first)), kWords,
               words + (4 + j) * stride);
  }
}
#endif

// Loads `num_bytes` bytes of each of kVecLanes slots as 32-bit words,
// transposed: word i of all slots is stored at words + i * stride. Prefetches
// half as many cache lines as it reads; the products that use the words
// prefetch the other half.
HWY_INLINE void LoadWords(const char* const* slots, const char* const* readable,
                          int64_t num_bytes, uint32_t* words, int64_t stride,
                          AheadLines* ahead) {
  constexpr int64_t kVecBytes = kVecLanes * 4;
  // Up to this number of words, copying them one by one beats transposing.
  constexpr int64_t kFew = 4;
  for (int64_t first = 0; first < num_bytes; first += kVecBytes) {
    const int64_t bytes = std::min(kVecBytes, num_bytes - first);
    uint32_t* to = words + first / 4 * stride;
    ahead->Ask(bytes * kVecLanes / (2 * AheadLines::kLineBytes));
    if (bytes <= kFew * 4) {
      for (int lane = 0; lane < kVecLanes; ++lane) {
        uint32_t few[kFew] = {};
        const char* from = slots[lane] + first;
        if (from + sizeof(few) <= readable[lane]) {
          std::memcpy(few, from, sizeof(few));
        } else {
          std::memcpy(few, from, static_cast<size_t>(bytes));
        }
        for (int i = 0; i < kFew; ++i) to[i * stride + lane] = few[i];
      }
      continue;
    }
    const bool half = HWY_TARGET <= HWY_AVX3 && bytes <= kVecBytes / 2;
    const int64_t loaded = half ? kVecBytes / 2 : kVecBytes;
    HWY_ALIGN uint32_t staged[kVecLanes][kVecLanes];
    const char* rows[kVecLanes];
    int64_t room = loaded;
    for (int lane = 0; lane < kVecLanes; ++lane) {
      rows[lane] = slots[lane] + first;
      room = std::min<int64_t>(room, readable[lane] - rows[lane]);
    }
    for (int lane = 0; room < loaded && lane < kVecLanes; ++lane) {
      // `bytes` never exceeds a row of `staged`. The minimum only avoids a
      // wrong warning of GCC 12 under -fsanitize.
      std::memcpy(staged[lane], rows[lane],
                  std::min(sizeof(staged[lane]), static_cast<size_t>(bytes)));
      rows[lane] = reinterpret_cast<const char*>(staged[lane]);
    }
#if HWY_TARGET <= HWY_AVX3
    if (half) {
      LoadFewWords(rows, 0, to, stride);
      continue;
    }
#endif
    WordVec lanes[kVecLanes];
    for (int lane = 0; lane < kVecLanes; ++lane) {
      lanes[lane] =
          hn::LoadU(kWords, reinterpret_cast<const uint32_t*>(rows[lane]));
    }
    Transpose(lanes);
    for (int i = 0; i < kVecLanes; ++i) {
      hn::StoreU(lanes[i], kWords, to + i * stride);
    }
  }
}

// Stores a channel's codes as float32. If kAbove > 0, `out` already has the
// lowest kAbove bits of the codes, and `codes` has the bits above them.
template <int kAbove>
HWY_INLINE void StoreCodes(WordVec codes, float* out) {
  const hn::RebindToSigned<Floats> d32;
  const Vec numbers = hn::ConvertTo(kFloats, hn::BitCast(d32, codes));
  if constexpr (kAbove > 0) {
    hn::StoreU(Fma(Broadcast(static_cast<float>(1 << kAbove)), numbers,
                   LoadFloats(out)),
               kFloats, out);
  } else {
    hn::StoreU(numbers, kFloats, out);
  }
}

// Unpacks the codes of a word that holds only whole codes, from code kIndex on.
template <int kBits, int kAbove, int kIndex>
HWY_INLINE void UnpackWord(WordVec word, WordVec mask, float* out) {
  if constexpr (kIndex * kBits < 32) {
    StoreCodes<kAbove>(hn::And(hn::ShiftRight<kIndex * kBits>(word), mask),
                       out + kIndex * kBlock);
    UnpackWord<kBits, kAbove, kIndex + 1>(word, mask, out);
  } else {
    (void)word, (void)mask, (void)out;
  }
}

// Unpacks `count` codes of kBits bits each, which begin at bit `bit` of each
// slot's words. Writes each channel to a row of `out`, with rows kBlock apart.
template <int kBits, int kAbove = 0>
void UnpackChannels(const uint32_t* words, int64_t bit, int64_t count,
                    float* out) {
  constexpr int kPerWord = 32 / kBits;
  const WordVec mask = hn::Set(kWords, (1u << kBits) - 1u);
  int64_t i = 0;
  const auto one = [&] {
    const WordVec word = hn::LoadU(kWords, words + bit / 32 * kVecLanes);
    const WordVec codes = hn::ShiftRightSame(word, static_cast<int>(bit % 32));
    StoreCodes<kAbove>(hn::And(codes, mask), out + i * kBlock);
    bit += kBits;
    ++i;
  };
  while (i < count && bit % 32 != 0) one();
  for (; i + kPerWord <= count; i += kPerWord, bit += 32) {
    UnpackWord<kBits, kAbove, 0>(
        hn::LoadU(kWords, words + bit / 32 * kVecLanes), mask,
        out + i * kBlock);
  }
  while (i < count) one();
}

// Like LoadWords, from byte `begin` of each slot on. May read whole vectors of
// words, even beyond the requested bytes.
HWY_INLINE void LoadRoomyWords(const char* const* slots, int64_t begin,
                               int64_t num_bytes, uint32_t* words,
                               int64_t stride, AheadLines* ahead) {
  constexpr int64_t kVecBytes = kVecLanes * 4;
  for (int64_t first = 0; first < num_bytes; first += kVecBytes) {
    const int64_t bytes = std::min(kVecBytes, num_bytes - first);
    uint32_t* to = words + first / 4 * stride;
    ahead->Ask(bytes * kVecLanes / (2 * AheadLines::kLineBytes));
#if HWY_TARGET <= HWY_AVX3
    if (bytes <= kVecBytes / 2) {
      LoadFewWords(slots, begin + first, to, stride);
      continue;
    }
#endif
    WordVec lanes[kVecLanes];
    for (int lane = 0; lane < kVecLanes; ++lane) {
      lanes[lane] = hn::LoadU(kWords, reinterpret_cast<const uint32_t*>(
                                          slots[lane] + begin + first));
    }
    Transpose(lanes);
    for (int i = 0; i < kVecLanes; ++i) {
      hn::StoreU(lanes[i], kWords, to + i * stride);
    }
  }
}

// Loads the bytes of a chunk, from slots [s, s + kVecLanes), as 32-bit words,
// plane by plane. plane_words gets the start of each plane's words.
HWY_INLINE void LoadPlanes(const BlockSlots& slots, const ChunkBytes& chunk,
                           int64_t s, uint32_t* words, int64_t stride,
                           uint32_t* plane_words[4], AheadLines* ahead) {
  for (int plane = 0; plane < 4; ++plane) {
    if (chunk.together && plane > 0) {
      plane_words[plane] = plane_words[0];
      continue;
    }
    plane_words[plane] = words;
    const int64_t begin = chunk.begin[plane];
    const int64_t bytes = chunk.end[plane] - begin;
    if (bytes == 0) continue;
    constexpr int64_t kVecBytes = kVecLanes * 4;
    const int64_t whole = (bytes + kVecBytes - 1) / kVecBytes * kVecBytes;
    if (slots.regular && slots.room >= begin + whole) {
      LoadRoomyWords(slots.codes + s, begin, bytes, words, stride, ahead);
      words += whole / 4 * stride;
      continue;
    }
    const char* rows[kVecLanes];
    const char* readable[kVecLanes];
    const bool all = s >= slots.begin && s + kVecLanes <= slots.end;
    for (int lane = 0; lane < kVecLanes; ++lane) {
      rows[lane] = slots.codes[s + lane] + begin;
      readable[lane] = slots.readable[s + lane];
    }
    for (int lane = 0; !all && lane < kVecLanes; ++lane) {
      if (s + lane >= slots.begin && s + lane < slots.end) continue;
      rows[lane] = kNoSlot;
      readable[lane] = kNoSlot + sizeof(kNoSlot);
    }
    LoadWords(rows, readable, bytes, words, stride, ahead);
    words += whole / 4 * stride;
  }
}

// Writes a chunk's codes, converted to float32, to tile [chunk.width, 64].
inline void UnpackKeys(const BlockSlots& slots, const LatentChunk& chunk,
                       const CodePiece* pieces, float* tile,
                       AheadLines* ahead) {
  HWY_ALIGN uint32_t words[kMaxWords * kVecLanes];
  for (int64_t s = 0; s < kBlock; s += kVecLanes) {
    uint32_t* plane_words[4];
    LoadPlanes(slots, chunk.bytes, s, words, kVecLanes, plane_words, ahead);
    for (int64_t p = 0; p < chunk.num_pieces; ++p) {
      const CodePiece& piece = pieces[p];
      const CodePlace& place = piece.in_chunk;
      const uint32_t* from = plane_words[PlaneIndex(place.low_bits)];
      float* to = tile + (piece.begin - chunk.begin) * kBlock + s;
      switch (place.low_bits) {
        case 8:
          UnpackChannels<8>(from, place.low_bit, piece.width, to);
          break;
        case 4:
          UnpackChannels<4>(from, place.low_bit, piece.width, to);
          break;
        case 2:
          UnpackChannels<2>(from, place.low_bit, piece.width, to);
          break;
        default:
          UnpackChannels<1>(from, place.low_bit, piece.width, to);
      }
      if (place.high_bits == 0) continue;
      from = plane_words[PlaneIndex(place.high_bits)];
      if (place.bits() == 3) {
        UnpackChannels<1, 2>(from, place.high_bit, piece.width, to);
      } else if (place.bits() == 5) {
        UnpackChannels<1, 4>(from, place.high_bit, piece.width, to);
      } else {
        UnpackChannels<2, 4>(from, place.high_bit, piece.width, to);
      }
    }
  }
}

// ----- Values: a vector has several channels of one slot.

#if HWY_TARGET != HWY_SCALAR
// Extracts the codes of kVecLanes channels from a slot's bytes. Holds, for each
// lane, the index of the code's first byte and how far to shift.
class LaneCodes {
 public:
  LaneCodes(int64_t bit, int bits)
      : first_byte_(bit / 8),
        step_bytes_(kVecLanes * bits / 8),
        mask_(hn::Set(kWords, (1u << bits) - 1u)) {
    HWY_ALIGN uint8_t bytes[4 * kVecLanes];
    HWY_ALIGN uint32_t shifts[kVecLanes];
    for (int lane = 0; lane < kVecLanes; ++lane) {
      const int at = static_cast<int>(bit % 8) + lane * bits;
      bytes[4 * lane] = static_cast<uint8_t>(at / 8);
      // For an index of 0x80, TableLookupBytesOr0 returns 0.
      for (int i = 1; i < 4; ++i) bytes[4 * lane + i] = 0x80;
      shifts[lane] = static_cast<uint32_t>(at % 8);
    }
    bytes_ = hn::Load(kBytes, bytes);
    shifts_ = hn::Load(kWords, shifts);
  }

  int64_t first_byte() const { return first_byte_; }
  int64_t step_bytes() const { return step_bytes_; }

  // Returns the codes. `from` points to 16 readable bytes; the first one holds
  // the first code.
  HWY_INLINE WordVec At(const uint8_t* from) const {
    const auto spread =
        hn::TableLookupBytesOr0(hn::LoadDup128(kBytes, from), bytes_);
    return hn::And(hn::Shr(hn::BitCast(kWords, spread), shifts_), mask_);
  }

 private:
  using Bytes = hn::Repartition<uint8_t, Words>;
  static constexpr Bytes kBytes = {};
  int64_t first_byte_;
  int64_t step_bytes_;
  WordVec mask_;
  hn::Vec<Bytes> bytes_;
  WordVec shifts_;
};

#endif

// Find returns a pointer to `count` bytes of a slot, from byte `first` on,
// which are followed by 16 more readable bytes. If the slot's readable memory
// ends earlier (at `readable`), the pointer is to a copy.
class ReadableBytes {
 public:
  const uint8_t* Find(const char* slot, const char* readable, int64_t first,
                      int64_t count) {
    const char* from = slot + first;
    if (from + count + 16 > readable) {
      std::memcpy(copy_, from, static_cast<size_t>(count));
      return copy_;
    }
    return reinterpret_cast<const uint8_t*>(from);
  }

 private:
  uint8_t copy_[kChunkChannels + 16 + 16] = {};
};

// Writes the codes of a piece, as float32, to rows [slots.begin, slots.end) and
// columns [0, piece.width) of tile [64, stride]. May also overwrite up to
// kVecLanes - 1 columns after them.
inline void UnpackValues(const BlockSlots& slots, const CodePiece& piece,
                         int64_t stride, float* tile) {
  const CodePlace& place = piece.place;
  const int64_t low_bytes =
      (place.low_bit % 8 + piece.width * place.low_bits + 7) / 8;
  ReadableBytes low_source;
  if (place.low_bits == 8) {
    for (int64_t s = slots.begin; s < slots.end; ++s) {
      const uint8_t* from = low_source.Find(slots.codes[s], slots.readable[s],
                                            place.low_bit / 8, low_bytes);
      for (int64_t i = 0; i < piece.width; i += kVecLanes) {
        hn::StoreU(LoadFloats(from + i), kFloats, tile + s * stride + i);
      }
    }
    return;
  }
  if (kVecLanes * place.low_bits % 8 != 0 ||
      kVecLanes * place.high_bits % 8 != 0) {
    // Here a vector of codes does not fill whole bytes, so codes are read one
    // by one.
    for (int64_t s = slots.begin; s < slots.end; ++s) {
      for (int64_t i = 0; i < piece.width; ++i) {
        tile[s * stride + i] = static_cast<float>(ReadCode(
            reinterpret_cast<const uint8_t*>(slots.codes[s]), place, i));
      }
    }
    return;
  }
#if HWY_TARGET != HWY_SCALAR
  const hn::RebindToSigned<Floats> d32;
  const LaneCodes low(place.low_bit, place.low_bits);
  const bool high = place.high_bits > 0;
  const LaneCodes high_codes(place.high_bit, high ? place.high_bits : 1);
  const int64_t high_bytes =
      (place.high_bit % 8 + piece.width * place.high_bits + 7) / 8;
  ReadableBytes high_source;
  for (int64_t s = slots.begin; s < slots.end; ++s) {
    const uint8_t* from = low_source.Find(slots.codes[s], slots.readable[s],
                                          low.first_byte(), low_bytes);
    const uint8_t* from_high =
        high ? high_source.Find(slots.codes[s], slots.readable[s],
                                high_codes.first_byte(), high_bytes)
             : nullptr;
    float* to = tile + s * stride;
    for (int64_t i = 0; i < piece.width; i += kVecLanes) {
      WordVec codes = low.At(from);
      from += low.step_bytes();
      if (high) {
        codes = hn::Or(
            codes, hn::ShiftLeftSame(high_codes.At(from_high), place.low_bits));
        from_high += high_codes.step_bytes();
      }
      hn::StoreU(hn::ConvertTo(kFloats, hn::BitCast(d32, codes)), kFloats,
                 to + i);
    }
  }
#endif
}

// Writes channels [first, first + width) of unquantized slots to rows
// [slots.begin, slots.end) of tile [64, stride].
template <typename T>
void ConvertValues(const BlockSlots& slots, int64_t first, int64_t width,
                   int64_t stride, float* tile) {
  for (int64_t s = slots.begin; s < slots.end; ++s) {
    const T* from = reinterpret_cast<const T*>(slots.codes[s]) + first;
    float* to = tile + s * stride;
    int64_t i = 0;
    for (; i + kVecLanes <= width; i += kVecLanes) {
      hn::StoreU(LoadFloats(from + i), kFloats, to + i);
    }
    for (; i < width; ++i) to[i] = ToFloat(from[i]);
  }
}

// ----- Ranges (scale and minimum) that are stored in slots.

// Converts the two 16-bit numbers in each word to float32.
HWY_INLINE void SplitPairs(WordVec words, Bf16, float* low, float* high) {
  hn::StoreU(hn::BitCast(kFloats, hn::ShiftLeft<16>(words)), kFloats, low);
  hn::StoreU(hn::BitCast(kFloats, hn::And(words, hn::Set(kWords, 0xffff0000u))),
             kFloats, high);
}
HWY_INLINE void SplitPairs(WordVec words, F16, float* low, float* high) {
  const hn::Rebind<uint16_t, Words> d16;
  HWY_ALIGN F16 halves[2][kVecLanes];
  hn::StoreU(hn::TruncateTo(d16, words), d16,
             reinterpret_cast<uint16_t*>(halves[0]));
  hn::StoreU(hn::TruncateTo(d16, hn::ShiftRight<16>(words)), d16,
             reinterpret_cast<uint16_t*>(halves[1]));
  hn::StoreU(LoadFloats(halves[0]), kFloats, low);
  hn::StoreU(LoadFloats(halves[1]), kFloats, high);
}

// Loads the scales [64] of slots whose codes stand for levels. Slots that no
// row sees get 0.
template <typename T>
void LoadLengths(const BlockSlots& slots, int64_t stride_bytes, float* scale) {
  if (slots.regular && stride_bytes == sizeof(T)) {
    for (int64_t s = 0; s < kBlock; s += kVecLanes) {
      hn::StoreU(LoadFloats(reinterpret_cast<const T*>(slots.ranges[s])),
                 kFloats, scale + s);
    }
    return;
  }
  std::fill_n(scale, kBlock, 0.0f);
  for (int64_t s = slots.begin; s < slots.end; ++s) {
    T stored;
    std::memcpy(&stored, slots.ranges[s], sizeof(stored));
    scale[s] = ToFloat(stored);
  }
}

// Loads one run's scales [64] and minima [64]. Slots that no row sees get 0.
template <typename T>
void LoadRanges(const BlockSlots& slots, int64_t stride_bytes, int64_t run,
                float* scale, float* minimum) {
  const int64_t offset = run * 2 * static_cast<int64_t>(sizeof(T));
  if constexpr (sizeof(T) == 2) {
    if (slots.regular && stride_bytes == 4) {
      for (int64_t s = 0; s < kBlock; s += kVecLanes) {
        SplitPairs(hn::LoadU(kWords, reinterpret_cast<const uint32_t*>(
                                         slots.ranges[s])),
                   T(), scale + s, minimum + s);
      }
      return;
    }
    HWY_ALIGN uint32_t pairs[kBlock];
    if (slots.end - slots.begin < kBlock) std::fill_n(pairs, kBlock, 0u);
    for (int64_t s = slots.begin; s < slots.end; ++s) {
      std::memcpy(pairs + s, slots.ranges[s] + offset, sizeof(pairs[0]));
    }
    for (int64_t s = 0; s < kBlock; s += kVecLanes) {
      SplitPairs(hn::Load(kWords, pairs + s), T(), scale + s, minimum + s);
    }
  } else {
    std::fill_n(scale, kBlock, 0.0f);
    std::fill_n(minimum, kBlock, 0.0f);
    for (int64_t s = slots.begin; s < slots.end; ++s) {
      std::memcpy(scale + s, slots.ranges[s] + offset, sizeof(T));
      std::memcpy(minimum + s, slots.ranges[s] + offset + sizeof(T), sizeof(T));
    }
  }
}

// ----- Loading a block.

// Loads the chunks and ranges of one block at a time.
// Threads: each object is used by one thread only.
class BlockLoader {
 public:
  BlockLoader(const AttentionGrid& grid, const AttentionSequence& sequence,
              float* scratch)
      : params_(grid.params()),
        grid_(grid),
        sequence_(sequence),
        tile_(scratch + grid.scratch().tile),
        scales_(scratch + grid.scratch().scales),
        minima_(scratch + grid.scratch().minima) {
    std::fill_n(found_.codes, kBlock, kNoSlot);
    std::fill_n(found_.readable, kBlock, kNoSlot);
  }

  // Begins a block. `needed` are the slots of the block that at least one row
  // reads.
  void StartBlock(int64_t block, VisibleRange needed) {
    block_ = block;
    found_.begin = needed.begin - block;
    found_.end = needed.end - block;
    found_part_ = nullptr;
    exact_rows_.Start();
    loaded_ = nullptr;
  }
  int64_t block() const { return block_; }
  const BlockSlots& slots() const { return found_; }

  // The queue of memory to prefetch. A function that reads a chunk also
  // prefetches about as many lines as it reads. If it only loads words of
  // codes, it prefetches half as many, and the products of these words prefetch
  // the other half.
  AheadLines* ahead() { return &ahead_; }
  // Must be called before a group of the block is read. Then about as many more
  // bytes may be prefetched as will be read. A repeated call has no effect.
  void StartGroup(const LatentPartArgs& part, const LatentGroup& group) {
    if (grid_.exact(part) != nullptr) return;
    if (started_group_ == &group && started_block_ == block_) return;
    started_group_ = &group;
    started_block_ = block_;
    const bool ranges = group.num_runs > 0 && part.static_scale == nullptr;
    ahead_.Read(
        (found_.end - found_.begin) *
        (group.codes.stride_bytes + (ranges ? group.params.stride_bytes : 0)));
  }
  // Appends the memory of a group's codes and ranges for `slots` to the
  // prefetch queue. `part` must be a part of the cache, not of exact rows.
  void AddAhead(const LatentPartArgs& part, const LatentGroup& group,
                VisibleRange slots) {
    for (int64_t s = slots.begin; s < slots.end;) {
      const Run run = RunAt(part, group, s, slots.end);
      ahead_.Add(run.codes, run.count * group.codes.stride_bytes);
      if (group.num_runs > 0 && part.static_scale == nullptr) {
        ahead_.Add(
            SlotAddress(
                part, group.params,
                sequence_.block_table.device_address()[s / params_.page_tokens],
                s % params_.page_tokens),
            run.count * group.params.stride_bytes);
      }
      s += run.count;
    }
  }

  float* tile() const { return tile_; }
  // Returns the tile for the caller to overwrite. The chunk in the tile no
  // longer counts as loaded.
  float* StartTile() {
    loaded_ = nullptr;
    return tile_;
  }
  // Return the scales [64] and minima [64] of a piece of the chunk loaded last.
  const float* scales(int64_t piece) const { return scales_ + piece * kBlock; }
  const float* minima(int64_t piece) const { return minima_ + piece * kBlock; }

  // Loads a chunk of keys, decoded and transposed, as tile [chunk.width, 64],
  // and the ranges of its runs.
  void LoadKeys(const LatentPartArgs& part, const LatentGroup& group,
                const LatentChunk& chunk) {
    if (loaded_ == &chunk) return;
    loaded_ = &chunk;
    Find(part, group);
    if (chunk.begin == 0) StartGroup(part, group);
    if (chunk.num_pieces == 0) return TransposeChunk(part.dtype, chunk);
    UnpackKeys(found_, chunk, grid_.pieces(chunk), tile_, &ahead_);
    if (part.num_levels > 0) {
      LookUpLevels(part.levels, chunk.width * kBlock, tile_);
    }
    LoadChunkRanges(part, group, chunk);
  }

  // Loads a chunk of keys without decoding it: the slots' bytes as transposed
  // 32-bit words, [words, 64], and the ranges of its runs. A word of bfloat16
  // numbers holds two channels.
  void LoadKeyWords(const LatentPartArgs& part, const LatentGroup& group,
                    const LatentChunk& chunk) {
    loaded_ = nullptr;
    Find(part, group);
    if (chunk.begin == 0) StartGroup(part, group);
    const ChunkBytes bytes =
        chunk.num_pieces > 0 ? chunk.bytes : BytesOfPairs(chunk);
    auto* words = reinterpret_cast<uint32_t*>(tile_);
    for (int64_t s = 0; s < kBlock; s += kVecLanes) {
      LoadPlanes(found_, bytes, s, words + s, kBlock, plane_words_, &ahead_);
    }
    for (uint32_t*& plane : plane_words_) plane -= kBlock - kVecLanes;
    if (chunk.num_pieces > 0) LoadChunkRanges(part, group, chunk);
  }
  // The words of each plane that LoadKeyWords loaded last.
  const uint32_t* const* key_words() const { return plane_words_; }
  // The pairs of bfloat16 numbers that LoadKeyWords loaded last.
  const uint32_t* key_pairs() const { return plane_words_[0]; }

  // Returns the addresses of the block's slots for this group.
  const BlockSlots& FindSlots(const LatentPartArgs& part,
                              const LatentGroup& group) {
    Find(part, group);
    return found_;
  }

  // Loads a chunk of unquantized numbers without transposing it, as tile
  // [64, stride].
  void LoadValues(const LatentPartArgs& part, const LatentGroup& group,
                  const LatentChunk& chunk, int64_t stride) {
    loaded_ = nullptr;
    Find(part, group);
    VisitDType(part.dtype, [&](auto type) {
      ConvertValues<decltype(type)>(found_, chunk.begin, chunk.width, stride,
                                    tile_);
    });
  }
  void LoadValueCodes(const LatentPartArgs& part, const LatentGroup& group,
                      const CodePiece& piece, int64_t stride) {
    loaded_ = nullptr;
    Find(part, group);
    UnpackValues(found_, piece, stride, tile_);
    if (part.num_levels == 0) return;
    for (int64_t s = found_.begin; s < found_.end; ++s) {
      LookUpLevels(part.levels, piece.width, tile_ + s * stride);
    }
  }
  void LoadValueRanges(const LatentPartArgs& part, const LatentGroup& group,
                       const LatentChunk& chunk) {
    Find(part, group);
    LoadChunkRanges(part, group, chunk);
  }

  // Slots whose codes are equally spaced in memory. RunAt returns the slots
  // from `slot` to the end of its page tile (LatentPartIn::tile_slots), or to
  // `end` if that is earlier.
  struct Run {
    const char* codes;
    int64_t count;
  };
  Run RunAt(const LatentPartArgs& part, const LatentGroup& group, int64_t slot,
            int64_t end) const {
    const int64_t in_page = slot % params_.page_tokens;
    return {
        SlotAddress(
            part, group.codes,
            sequence_.block_table.device_address()[slot / params_.page_tokens],
            in_page),
        std::min(end - slot, part.tile_slots - in_page % part.tile_slots)};
  }

 private:
  static ChunkBytes BytesOfPairs(const LatentChunk& chunk) {
    ChunkBytes bytes;
    bytes.begin[0] = 2 * chunk.begin;
    bytes.end[0] = 2 * (chunk.begin + chunk.width);
    return bytes;
  }

  void Find(const LatentPartArgs& part, const LatentGroup& group) {
    if (found_part_ == &part && found_group_ == &group) return;
    found_part_ = &part;
    found_group_ = &group;
    found_.regular = false;
    if (const AttentionGrid::ExactPart* exact = grid_.exact(part)) {
      return exact_rows_.Find(sequence_, *exact, &group - part.groups, block_,
                              found_.begin, found_.end, found_.codes,
                              found_.readable);
    }
    found_.regular = found_.begin == 0 && found_.end == kBlock &&
                     part.tile_slots % kVecLanes == 0;
    found_.room = part.page_bytes;
    const int64_t end = block_ + found_.end;
    for (int64_t s = block_ + found_.begin; s < end;) {
      const int64_t page_of_sequence = s / params_.page_tokens;
      const int64_t in_page = s - page_of_sequence * params_.page_tokens;
      const int64_t page =
          sequence_.block_table.device_address()[page_of_sequence];
      const int64_t in_tile =
          in_page < part.tile_slots ? in_page : in_page % part.tile_slots;
      const int64_t count = std::min(end - s, part.tile_slots - in_tile);
      const char* codes = SlotAddress(part, group.codes, page, in_page);
      const char* ranges = SlotAddress(part, group.params, page, in_page);
      const char* readable =
          static_cast<const char*>(part.arena) + (page + 1) * part.page_bytes;
      const int64_t first = s - block_;
      FillRows(codes, group.codes.stride_bytes, count, found_.codes + first);
      FillRows(readable, 0, count, found_.readable + first);
      found_.room = std::min<int64_t>(
          found_.room,
          readable - (codes + (count - 1) * group.codes.stride_bytes));
      if (group.num_runs > 0 && part.static_scale == nullptr) {
        FillRows(ranges, group.params.stride_bytes, count,
                 found_.ranges + first);
      }
      s += count;
    }
  }

  void TransposeChunk(DType dtype, const LatentChunk& chunk) {
    const char* rows[kBlock];
    const int64_t offset = chunk.begin * DTypeBytes(dtype);
    std::fill_n(rows, kBlock, kNoSlot);
    for (int64_t s = found_.begin; s < found_.end; ++s) {
      rows[s] = found_.codes[s] + offset;
    }
    switch (dtype) {
      case DType::kF32:
        return TransposeRows<float>(rows, kBlock, chunk.width, tile_, &ahead_);
      case DType::kF16:
        return TransposeRows<F16>(rows, kBlock, chunk.width, tile_, &ahead_);
      case DType::kBf16:
        return TransposeRows<Bf16>(rows, kBlock, chunk.width, tile_, &ahead_);
    }
  }

  void LoadChunkRanges(const LatentPartArgs& part, const LatentGroup& group,
                       const LatentChunk& chunk) const {
    if (part.static_scale != nullptr) return;
    const CodePiece* pieces = grid_.pieces(chunk);
    VisitDType(part.param_dtype, [&](auto type) {
      if (part.num_levels > 0) {
        // With levels there is one run, so all pieces have the same scale.
        LoadLengths<decltype(type)>(found_, group.params.stride_bytes, scales_);
        std::fill_n(minima_, kBlock, 0.0f);
        for (int64_t p = 1; p < chunk.num_pieces; ++p) {
          std::copy_n(scales_, kBlock, scales_ + p * kBlock);
          std::fill_n(minima_ + p * kBlock, kBlock, 0.0f);
        }
        return;
      }
      for (int64_t p = 0; p < chunk.num_pieces; ++p) {
        LoadRanges<decltype(type)>(found_, group.params.stride_bytes,
                                   pieces[p].run, scales_ + p * kBlock,
                                   minima_ + p * kBlock);
      }
    });
  }

  const PagedAttentionArgs& params_;
  const AttentionGrid& grid_;
  const AttentionSequence& sequence_;
  float* const tile_;
  float* const scales_;
  float* const minima_;
  int64_t block_ = 0;
  AheadLines ahead_;
  const LatentGroup* started_group_ = nullptr;
  int64_t started_block_ = 0;
  BlockSlots found_;
  const LatentPartArgs* found_part_ = nullptr;
  const LatentGroup* found_group_ = nullptr;
  BlockExactRows exact_rows_;
  const LatentChunk* loaded_ = nullptr;
  uint32_t* plane_words_[4] = {};
};
// LoadKeyWords stores a chunk's words in the tile, so the tile must have room
// for them.
static_assert(kMaxWords <= kChunkChannels);

}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#endif  // KVASIR_KERNELS_LATENT_TILE_INL_H_
