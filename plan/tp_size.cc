#include "plan/tp_size.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "plan/tp_shard.h"

namespace kvasir::plan {

bool TpSizeFits(const TpDealt& dealt, int64_t size) {
  return (size == 1 || dealt.whole_because == nullptr) &&
         KvHeadsOfRank({.rank = 0, .size = size}, dealt.num_kv_heads).ok() &&
         dealt.num_heads % size == 0 && dealt.num_features % size == 0;
}

std::vector<int64_t> FittingTpSizes(const TpDealt& dealt) {
  std::vector<int64_t> sizes;
  for (int64_t size = 1; size <= dealt.num_heads; ++size) {
    if (TpSizeFits(dealt, size)) sizes.push_back(size);
  }
  return sizes;
}

absl::Status CheckTpSize(const TpDealt& dealt, int64_t size) {
  if (TpSizeFits(dealt, size)) return absl::OkStatus();
  if (dealt.whole_because != nullptr && size > 1) {
    return absl::UnimplementedError(
        absl::StrCat("the model cannot be divided among ", size,
                     " tensor-parallel ranks, because ", dealt.whole_because,
                     "; ", WouldDo(FittingTpSizes(dealt))));
  }
  return absl::InvalidArgumentError(absl::StrCat(
      dealt.num_kv_heads, " KV heads, ", dealt.num_heads, " query heads and ",
      dealt.num_features, " MLP features cannot be divided among ", size,
      " tensor-parallel ranks in equal parts; ",
      WouldDo(FittingTpSizes(dealt))));
}

std::string WouldDo(const std::vector<int64_t>& sizes) {
  if (sizes.empty()) return "no number of ranks is possible";
  std::string text = absl::StrJoin(sizes.begin(), sizes.end() - 1, ", ");
  return absl::StrCat("possible numbers of ranks: ", text,
                      text.empty() ? "" : " or ", sizes.back());
}

}  // namespace kvasir::plan
