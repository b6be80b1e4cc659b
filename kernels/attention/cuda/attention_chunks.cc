#include "kernels/attention/cuda/attention_chunks.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/attention/params/code_digits.h"
#include "kernels/latents/code_pack.h"
#include "kernels/latents/code_range.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kPieceBytes = 16;
bool Whole(int64_t bytes, int64_t of) { return bytes % of == 0; }

// Where a slot stores the codes of a run, as the fields of LatentChunkOnDevice
// describe it.
struct RunPlanes {
  int64_t piece_channels = 0;
  int64_t low_bit = 0;
  int64_t high_bit = 0;
  int64_t high_bytes = 0;  // of a piece
  bool has_low = true;
};
RunPlanes RunPlanesOf(const CodePlace& place) {
  constexpr int64_t kPieceBits = 8 * kPieceBytes;
  if (place.bits() <= 1) {
    return {kPieceBits / 2, 0, place.low_bit, place.bits() * kPieceBytes / 2,
            false};
  }
  const int64_t channels = kPieceBits / place.low_bits;
  return {channels, place.low_bit, place.high_bit,
          channels * place.high_bits / 8, true};
}
// Returns whether the run's low plane is in whole pieces, and no piece's share
// of the high plane is in two pieces. Exact rows are read in whole pieces, too.
bool InPieces(const CodeRun& run, const RunPlanes& planes, bool exact) {
  if (run.bits == 0 && !exact) return true;
  return Whole(run.width, planes.piece_channels) &&
         Whole(planes.low_bit, 8 * kPieceBytes) &&
         (planes.high_bytes == 0 ||
          Whole(planes.high_bit, 8 * planes.high_bytes));
}

// Returns the distance in bytes between neighbouring 16-byte pieces of a slot.
// Returns 0 if tensor cores cannot use the pieces, because they are not
// aligned, have gaps, or are in tiles or pages that are too large.
int64_t PieceStride(const LatentPartArgs& part, const TileRegion& region,
                    int64_t slot_bytes) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (part.tile_bytes > kMost || part.page_bytes > kMost) return 0;
  for (const int64_t bytes : {part.page_bytes, part.tile_bytes,
                              region.offset_bytes, region.stride_bytes}) {
    if (!Whole(bytes, kPieceBytes)) return 0;
  }
  if (region.granule_bytes == kPieceBytes) return kPieceBytes * part.tile_slots;
  const bool gaps =
      region.granule_bytes != 0 || !Whole(slot_bytes, kPieceBytes);
  return gaps ? 0 : kPieceBytes;
}

// BoundScale computes LatentChunkOnDevice::less_scale and most_scale, which
// limit decoded values to the range of float16.
constexpr float kGreatestF16 = 65504.0f;
uint32_t PairOf(F16 half) { return half.bits | uint32_t{half.bits} << 16; }
void BoundScale(int bits, LatentChunkOnDevice* chunk) {
  // `share` is 1 / (greatest code), reduced slightly so that rounding cannot
  // make a decoded value exceed 65504.
  const float levels = static_cast<float>((1 << bits) - 1);
  const auto share = RoundToSide<F16, false>((1.0f - 0x1p-10f) / levels);
  chunk->less_scale = PairOf(F16{static_cast<uint16_t>(share.bits | 0x8000)});
  chunk->most_scale =
      PairOf(RoundToSide<F16, false>(kGreatestF16 * ToFloat(share)));
}
void BoundScale(const LatentPartArgs& part, LatentChunkOnDevice* chunk) {
  float most = 0.0f;
  for (int i = 0; i < part.num_levels; ++i) {
    most = std::max(most, std::abs(ToFloat(FromFloat<F16>(part.levels[i]))));
  }
  chunk->most_scale = PairOf(RoundToSide<F16, false>(kGreatestF16 / most));
}

// Returns the value of LatentChunkOnDevice::in_blocks for the chunk.
bool InBlocks(const LatentChunkOnDevice& chunk) {
  if (chunk.tile_slots != kAttentionBlockSlots ||
      chunk.slot_stride != kPieceBytes ||
      (chunk.pieces > 1 &&
       chunk.piece_stride != kAttentionBlockSlots * kPieceBytes)) {
    return false;
  }
  return chunk.kind == ChunkKind::kNumbers
             ? chunk.pieces % 2 == 0
             : chunk.params_stride == 4 &&
                   Whole(chunk.params_offset, kPieceBytes);
}

// Returns whether all exact rows in side pages begin at multiples of 16 bytes.
bool RowsAreAligned(const ExactSlots& slots, const LatentPartArgs& ring) {
  const auto misplaced = [](const ExactSegment& segment) {
    return !Whole(segment.arena_bytes, kPieceBytes) ||
           !Whole(segment.page_bytes, kPieceBytes) ||
           !Whole(segment.offset_bytes, kPieceBytes);
  };
  return Whole(slots.row_bytes, kPieceBytes) &&
         reinterpret_cast<uintptr_t>(ring.arena) % kPieceBytes == 0 &&
         std::none_of(slots.segments, slots.segments + slots.num_segments,
                      misplaced);
}

// Makes the chunks of the keys or values of one HeadUnit. The caller adds the
// groups of the parts one after another.
class ChunkMaker {
 public:
  ChunkMaker(DType dtype, bool keys, const ExactSlots& exact, HostChunks* made)
      : dtype_(dtype), keys_(keys), exact_(exact), made_(made) {}

  // Adds the chunks of group `g`. Returns an empty string, or the reason why
  // the group cannot have chunks. `rows` must not be null if these keys or
  // values have exact slots.
  std::string Add(const LatentPartArgs& part, int64_t g,
                  const int64_t* head_column, const ExactRowsArgs* rows) {
    const LatentGroup& group = part.groups[g];
    const int64_t slot_bytes = CodesBytes(part, group);
    chunk_ = {};
    chunk_.arena = static_cast<const char*>(part.arena);
    chunk_.page_bytes = part.page_bytes;
    chunk_.tile_bytes = static_cast<int32_t>(part.tile_bytes);
    chunk_.tile_slots = static_cast<int32_t>(part.tile_slots);
    chunk_.slot_stride = static_cast<int32_t>(group.codes.stride_bytes);
    piece_stride_ = PieceStride(part, group.codes, slot_bytes);
    chunk_.piece_stride = static_cast<int32_t>(piece_stride_);
    chunk_.head_column = head_column;
    codes_offset_ = group.codes.offset_bytes;
    if (piece_stride_ == 0 ||
        reinterpret_cast<uintptr_t>(part.arena) % kPieceBytes != 0) {
      return "latents are not in aligned pieces of 16 bytes, or a page or tile "
             "has 2^31 bytes or more";
    }
    if (exact_.any()) {
      std::string why = PlaceExact(*rows, g);
      if (!why.empty()) return why;
    }
    return group.num_runs == 0 ? AddNumbers(part, group)
                               : AddCodes(part, group);
  }

  int64_t columns() const { return column_; }
  int64_t digit_columns() const { return digit_columns_; }
  int64_t runs() const { return runs_; }

 private:
  // Returns an empty string, or the reason why tensor cores cannot use these
  // exact rows.
  std::string PlaceExact(const ExactRowsArgs& rows, int64_t g) {
    const LatentPartArgs& fresh = rows.fresh;
    const TileRegion& of_ring = rows.ring.groups[g].codes;
    const TileRegion& of_fresh = fresh.groups[g].codes;
    if (rows.ring.dtype != dtype_) {
      return absl::StrCat("exact rows are ", DTypeName(rows.ring.dtype),
                          ", but activations are ", DTypeName(dtype_));
    }
    if (!RowsAreAligned(exact_, rows.ring) ||
        !Whole(of_ring.offset_bytes, kPieceBytes) ||
        !Whole(of_fresh.offset_bytes, kPieceBytes) ||
        !Whole(of_fresh.stride_bytes, kPieceBytes) ||
        of_fresh.granule_bytes != 0 ||
        reinterpret_cast<uintptr_t>(fresh.arena) % kPieceBytes != 0) {
      return "exact rows are not in aligned pieces of 16 bytes";
    }
    chunk_.exact_ring =
        static_cast<const char*>(rows.ring.arena) + of_ring.offset_bytes;
    chunk_.exact_fresh =
        static_cast<const char*>(fresh.arena) + of_fresh.offset_bytes;
    chunk_.exact_fresh_stride = of_fresh.stride_bytes;
    return "";
  }

  std::string AddNumbers(const LatentPartArgs& part, const LatentGroup& group) {
    if (part.dtype != dtype_) {
      return absl::StrCat("numbers are ", DTypeName(part.dtype),
                          ", but activations are ", DTypeName(dtype_));
    }
    if (!Whole(group.width, 8)) {
      return absl::StrCat("a latent has ", group.width,
                          " channels, which is not a multiple of 8");
    }
    chunk_.kind = ChunkKind::kNumbers;
    RunPlanes numbers;
    numbers.piece_channels = 8;
    AddPieces(0, numbers, group.width,
              keys_ ? kMostKeyPieces : kMostNumberPieces);
    return "";
  }

  std::string AddCodes(const LatentPartArgs& part, const LatentGroup& group) {
    const bool is_static = part.static_scale != nullptr;
    if (!is_static && part.param_dtype != DType::kF16) {
      return "ranges are not float16";
    }
    const TileRegion& params = group.params;
    const bool levels = part.num_levels > 0;
    // Kernels read a slot's scale and minimum as one 32-bit word. With levels,
    // a slot has only a scale of 16 bits, so padding must follow it. Only pages
    // with granules have this padding.
    if (!is_static &&
        (!Whole(params.offset_bytes, 4) || !Whole(params.stride_bytes, 4) ||
         !Whole(params.granule_bytes, 4) ||
         (levels && params.granule_bytes == 0))) {
      return "ranges of slots are not in whole 32-bit words";
    }
    if (levels) {
      LevelIntegers integers = LevelIntegersOf(part);
      chunk_.step = integers.step;
      // A code of 1 bit is read as a code of 3 bits whose low bits are 0.
      if (part.num_levels == 2) integers.integers[4] = integers.integers[1];
      static_assert(sizeof(chunk_.level_words) == sizeof(integers.integers));
      std::memcpy(chunk_.level_words, integers.integers,
                  sizeof(chunk_.level_words));
      BoundScale(part, &chunk_);
    }
    if (part.num_levels == kMaxNormLevels) {
      HostChunks::Levels table;
      table.levels.assign(part.levels, part.levels + kMaxNormLevels);
      table.of_keys = keys_;
      const auto same = [&](const HostChunks::Levels& other) {
        return other.of_keys == keys_ && other.levels == table.levels;
      };
      const auto found =
          std::find_if(made_->levels.begin(), made_->levels.end(), same);
      chunk_.table = static_cast<int32_t>(found - made_->levels.begin());
      if (found == made_->levels.end()) made_->levels.push_back(table);
    }
    CodeCursor cursor(group);
    for (int64_t r = 0; r < group.num_runs; ++r) {
      const CodeRun& run = group.runs[r];
      const RunPlanes planes = RunPlanesOf(cursor.Next(run));
      if (!InPieces(run, planes, exact_.any())) {
        return absl::StrCat("run ", r, " has ", run.width, " codes of ",
                            run.bits, " bits, which are not whole pieces of ",
                            kPieceBytes, " bytes");
      }
      if (!levels) {
        if (run.bits > 0) BoundScale(run.bits, &chunk_);
        chunk_.step = run.bits == 1 ? 0.25f : 1.0f;
      }
      chunk_.kind = run.bits == 8  ? ChunkKind::kCodes8
                    : run.bits > 4 ? ChunkKind::kCodes6
                    : run.bits == 4
                        ? (levels ? ChunkKind::kLevels4 : ChunkKind::kCodes4)
                    : levels ? ChunkKind::kLevels3
                             : ChunkKind::kCodes3;
      const int64_t byte = 4 * r;
      const int64_t granule = params.granule_bytes;
      chunk_.params_offset = static_cast<int32_t>(
          params.offset_bytes +
          (granule == 0
               ? byte
               : byte / granule * granule * part.tile_slots + byte % granule));
      chunk_.params_stride = static_cast<int32_t>(params.stride_bytes);
      if (is_static) {
        chunk_.channel_scales = part.static_scale + group.column;
        chunk_.channel_minima = part.static_minimum + group.column;
        chunk_.params_offset = 0;  // not used
        chunk_.params_stride = 4;
      }
      chunk_.run = static_cast<int32_t>(runs_++);
      // The high plane of a chunk of keys must be in at most two pieces.
      const bool crosses =
          planes.high_bytes == 8 && !Whole(planes.high_bit, 8 * kPieceBytes);
      AddPieces(run.begin, planes, run.width,
                !keys_                    ? kMostCodePieces
                : run.bits == 8           ? kMostKeyPieces
                : run.bits < 4 || crosses ? kMostKeyPieces3
                                          : kMostKeyPieces4);
    }
    return "";
  }

  // Divides `width` channels, from channel `channel` of the group on, into
  // chunks of at most `most` pieces. The channels are a run of codes or a group
  // of unquantized numbers.
  void AddPieces(int64_t channel, const RunPlanes& planes, int64_t width,
                 int64_t most) {
    const int64_t pieces =
        (width + planes.piece_channels - 1) / planes.piece_channels;
    const int64_t begin = planes.low_bit / (8 * kPieceBytes);
    for (int64_t first = 0; first < pieces; first += most) {
      LatentChunkOnDevice chunk = chunk_;
      const int64_t count = std::min(most, pieces - first);
      chunk.codes_offset =
          static_cast<int32_t>(codes_offset_ + (begin + first) * piece_stride_);
      chunk.pieces = static_cast<int32_t>(count);
      chunk.has_low = planes.has_low;
      chunk.high_bytes = static_cast<int32_t>(planes.high_bytes);
      if (planes.high_bytes > 0) {
        const int64_t high = planes.high_bit / 8 + first * planes.high_bytes;
        const int64_t piece = high / kPieceBytes;
        chunk.high_byte = static_cast<int32_t>(high % kPieceBytes);
        chunk.high_pieces = static_cast<int32_t>(
            (chunk.high_byte + count * planes.high_bytes + kPieceBytes - 1) /
            kPieceBytes);
        chunk.high_offset =
            static_cast<int32_t>((piece - begin - first) * piece_stride_);
      }
      chunk.starts_run = first == 0;
      chunk.ends_run = first + count == pieces;
      chunk.channel =
          static_cast<int32_t>(channel + first * planes.piece_channels);
      chunk.channels =
          static_cast<int32_t>(std::min(count * planes.piece_channels,
                                        width - first * planes.piece_channels));
      if (chunk.channel_scales != nullptr) {
        chunk.channel_scales += chunk.channel;
        chunk.channel_minima += chunk.channel;
      }
      chunk.column = static_cast<int32_t>(column_);
      chunk.in_blocks = InBlocks(chunk);
      if (exact_.any()) {
        const int64_t bytes = DTypeBytes(dtype_) * chunk.channel;
        chunk.exact_ring += bytes;
        chunk.exact_fresh += bytes;
      }
      // Products read 16 channels of queries at a time, so each chunk of keys
      // is padded to a multiple of 16 columns.
      column_ += keys_ ? (chunk.channels + 15) / 16 * 16 : chunk.channels;
      if (keys_ && chunk.kind != ChunkKind::kNumbers) {
        chunk.digit_column = static_cast<int32_t>(digit_columns_);
        digit_columns_ += (chunk.channels + 63) / 64 * 64;
      }
      made_->chunks.push_back(chunk);
    }
  }

  const DType dtype_;
  const bool keys_;
  const ExactSlots& exact_;
  HostChunks* const made_;
  LatentChunkOnDevice chunk_;
  int64_t piece_stride_ = 0;
  int64_t codes_offset_ = 0;
  int64_t column_ = 0;
  int64_t digit_columns_ = 0;
  int64_t runs_ = 0;
};

// Returns how many 32-bit words are read at a time from each row of staged
// queries. Rows that are read together are in different banks if their distance
// is a multiple of 32 words (all banks) plus this number of words.
int64_t BanksOfRow(ChunkKind kind) {
  return kind == ChunkKind::kNumbers ? 4 : kind == ChunkKind::kCodes8 ? 8 : 16;
}

// Adds the chunks of a unit's keys and values. Returns an empty string, or the
// reason why the unit cannot have chunks.
std::string AddUnit(const PagedAttentionArgs& params, int64_t kv_head,
                    HostChunks* made) {
  UnitChunks unit;
  unit.first = static_cast<int32_t>(made->chunks.size());
  ChunkMaker keys(params.dtype, true, params.key_exact, made);
  for (int64_t p = 0; p < params.num_key_parts; ++p) {
    const AttentionKeyPartArgs& part = params.keys[p];
    const std::string why = keys.Add(part.latents, part.group_of_head[kv_head],
                                     part.query_column, part.exact);
    if (!why.empty()) return absl::StrCat("keys: ", why);
  }
  unit.keys = static_cast<int32_t>(made->chunks.size()) - unit.first;
  ChunkMaker values(params.dtype, false, params.value_exact, made);
  for (int64_t p = 0; p < params.num_value_parts; ++p) {
    const AttentionValuePartArgs& part = params.values[p];
    const std::string why = values.Add(
        part.latents, part.group_of_head[kv_head], part.out_column, part.exact);
    if (!why.empty()) return absl::StrCat("values: ", why);
  }
  unit.values =
      static_cast<int32_t>(made->chunks.size()) - unit.first - unit.keys;
  made->units.push_back(unit);
  const ChunkKind kind = made->chunks[static_cast<size_t>(unit.first)].kind;
  made->query_stride =
      std::max(made->query_stride,
               (keys.columns() + 63) / 64 * 64 + 2 * BanksOfRow(kind));
  // Lanes read 64 bytes at a time from two rows of digits. These are in
  // different banks if the distance of rows is an odd multiple of 64 bytes.
  if (keys.digit_columns() > 0) {
    made->digit_stride =
        std::max(made->digit_stride, keys.digit_columns() | 64);
  }
  if (keys.columns() <= kMmaMostQueries && keys.runs() <= kMmaMostRuns) {
    return "";
  }
  return absl::StrCat("keys: ", keys.columns(), " channels in ", keys.runs(),
                      " runs, but at most ", kMmaMostQueries, " channels in ",
                      kMmaMostRuns, " runs are supported");
}

HostChunks None(std::string why) {
  HostChunks none;
  none.why_none = std::move(why);
  return none;
}

}  // namespace

HostChunks MakeChunks(const PagedAttentionArgs& params,
                      const std::vector<int32_t>& heads,
                      const std::vector<HeadUnit>& units) {
  HostChunks made;
  if (params.dtype == DType::kF32) return None("activations are float32");
  for (int64_t p = 0; p < params.num_key_parts; ++p) {
    if (params.keys[p].rebuild != nullptr) return None("keys are rebuilt");
  }
  for (int64_t p = 0; p < params.num_value_parts; ++p) {
    if (params.values[p].lift != nullptr) return None("values are lifted");
  }
  const int64_t each = params.num_heads / params.num_kv_heads;
  for (const HeadUnit& unit : units) {
    const int64_t head = heads[static_cast<size_t>(unit.first_head)];
    std::string why = AddUnit(params, head / each, &made);
    if (!why.empty()) return None(std::move(why));
  }
  const int32_t tile_slots = made.chunks.front().tile_slots;
  for (const LatentChunkOnDevice& chunk : made.chunks) {
    if (chunk.tile_slots == tile_slots) continue;
    return None(absl::StrCat("tiles of ", tile_slots, " and of ",
                             chunk.tile_slots,
                             " slots, but all must have the same size"));
  }
  const int64_t tiles = params.page_tokens / tile_slots;
  if (std::max<int64_t>(tiles, tile_slots) > kMmaMostPlaces) {
    return None(absl::StrCat("pages of ", tiles, " tiles of ", tile_slots,
                             " slots, but at most ", kMmaMostPlaces,
                             " of each are supported"));
  }
  if (made.levels.size() <= static_cast<size_t>(kMmaMostTables)) return made;
  return None(absl::StrCat(made.levels.size(),
                           " tables of levels, but at most ", kMmaMostTables,
                           " are supported"));
}

}  // namespace kvasir::kernels
