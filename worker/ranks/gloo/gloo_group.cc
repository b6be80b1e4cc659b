#include "worker/ranks/gloo/gloo_group.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/status_macros.h"
#include "worker/collective/cpu_collective.h"

namespace kvasir::worker {
namespace {

// Computes out[i] = parts[0][i] + parts[1][i] + ..., in that order. `out` may
// be one of the parts.
void SumInOrder(absl::Span<const float* const> parts, int64_t count,
                float* out) {
  // The partial sums of one block fit into the L1 cache.
  constexpr int64_t kBlock = 1024;
  float sum[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    std::copy_n(parts[0] + begin, n, sum);
    for (size_t part = 1; part < parts.size(); ++part) {
      const float* const from = parts[part] + begin;
      for (int64_t i = 0; i < n; ++i) sum[i] += from[i];
    }
    std::copy_n(sum, n, out + begin);
  }
}

// Some columns of a matrix: the columns [first, first + width) of `data`
// [num_rows, columns]. They are seen as one sequence of elements, row after
// row.
struct Columns {
  float* data = nullptr;
  int64_t columns = 0;
  int64_t first = 0;
  int64_t width = 0;

  // Divides elements [begin, end) of the sequence into pieces that are
  // contiguous in memory, and calls visit(address, count) for each piece.
  template <typename Visit>
  void ForRuns(int64_t begin, int64_t end, const Visit& visit) const {
    while (begin < end) {
      const int64_t row = begin / width;
      const int64_t column = begin % width;
      const int64_t count = std::min(width - column, end - begin);
      visit(data + row * columns + first + column, count);
      begin += count;
    }
  }
};

class GlooCollective final : public HostCollective {
 public:
  explicit GlooCollective(std::shared_ptr<GlooMesh> mesh)
      : mesh_(std::move(mesh)),
        parts_(static_cast<size_t>(mesh_->shard().size)) {}

  plan::TpShard shard() const override { return mesh_->shard(); }

  absl::Status AllReduceSum(absl::Span<float> data) override {
    const auto count = static_cast<int64_t>(data.size());
    const GlooCall call =
        NextCall(CollectiveKind::kAllReduceSum, count * kFloat);
    const int64_t chunk = chunk_floats();
    // Each message is sent before the previous one is summed, so that sending
    // and summing overlap.
    KVASIR_RETURN_IF_ERROR(
        SendFloats(call, data.data(), std::min(chunk, count)));
    for (int64_t begin = 0; begin < count; begin += chunk) {
      const int64_t next = begin + chunk;
      if (next < count) {
        KVASIR_RETURN_IF_ERROR(SendFloats(call, data.data() + next,
                                          std::min(chunk, count - next)));
      }
      KVASIR_RETURN_IF_ERROR(
          Sum(call, data.data() + begin, std::min(chunk, count - begin)));
    }
    return absl::OkStatus();
  }

  absl::Status AllGather(float* data, int64_t num_rows,
                         absl::Span<const int64_t> first_columns) override {
    const int64_t columns = first_columns.back();
    const GlooCall call =
        NextCall(CollectiveKind::kAllGather, num_rows * columns * kFloat);
    const auto of_rank = [&](int64_t rank) -> Columns {
      const auto r = static_cast<size_t>(rank);
      return {data, columns, first_columns[r],
              first_columns[r + 1] - first_columns[r]};
    };
    int64_t widest = 0;
    for (int64_t rank = 0; rank < shard().size; ++rank) {
      widest = std::max(widest, of_rank(rank).width);
    }
    const int64_t chunk = chunk_floats();
    // Returns the end of the message that starts at element `begin`. A rank
    // with fewer columns than the widest rank has fewer elements, so its last
    // messages are empty and not sent.
    const auto end_of = [&](int64_t begin, const Columns& part) {
      return std::min(begin + chunk, num_rows * part.width);
    };
    const Columns own = of_rank(shard().rank);
    KVASIR_RETURN_IF_ERROR(SendColumns(call, own, 0, end_of(0, own)));
    for (int64_t begin = 0; begin < num_rows * widest; begin += chunk) {
      KVASIR_RETURN_IF_ERROR(
          SendColumns(call, own, begin + chunk, end_of(begin + chunk, own)));
      for (int64_t rank = 0; rank < shard().size; ++rank) {
        if (rank == shard().rank) continue;
        const Columns part = of_rank(rank);
        KVASIR_RETURN_IF_ERROR(
            ReceiveColumns(call, rank, part, begin, end_of(begin, part)));
      }
    }
    return absl::OkStatus();
  }

  absl::Status Broadcast(absl::Span<char> data) override {
    const auto size = static_cast<int64_t>(data.size());
    const GlooCall call = NextCall(CollectiveKind::kBroadcast, size);
    for (int64_t begin = 0; begin < size; begin += mesh_->chunk_bytes()) {
      const int64_t bytes = std::min(mesh_->chunk_bytes(), size - begin);
      if (shard().rank == 0) {
        KVASIR_ASSIGN_OR_RETURN(char* const to, mesh_->BeginSend());
        std::memcpy(to, data.data() + begin, static_cast<size_t>(bytes));
        KVASIR_RETURN_IF_ERROR(mesh_->Send(call, bytes));
      } else {
        KVASIR_ASSIGN_OR_RETURN(const char* const from,
                                mesh_->Receive(call, 0, bytes));
        std::memcpy(data.data() + begin, from, static_cast<size_t>(bytes));
        KVASIR_RETURN_IF_ERROR(mesh_->Release(0));
      }
    }
    return absl::OkStatus();
  }

  void Abort(const absl::Status& reason) override { mesh_->Abort(reason); }

  int64_t sent_bytes() const override { return mesh_->sent_bytes(); }
  double waited_seconds() const override { return mesh_->waited_seconds(); }

 private:
  static constexpr int64_t kFloat = sizeof(float);

  int64_t chunk_floats() const { return mesh_->chunk_bytes() / kFloat; }

  GlooCall NextCall(CollectiveKind kind, int64_t bytes) {
    return {++calls_, static_cast<uint32_t>(kind), bytes};
  }

  absl::Status SendFloats(const GlooCall& call, const float* data,
                          int64_t count) {
    KVASIR_ASSIGN_OR_RETURN(char* const to, mesh_->BeginSend());
    std::memcpy(to, data, static_cast<size_t>(count * kFloat));
    return mesh_->Send(call, count * kFloat);
  }

  absl::Status Sum(const GlooCall& call, float* data, int64_t count) {
    const int64_t own = shard().rank;
    for (int64_t rank = 0; rank < shard().size; ++rank) {
      const float*& part = parts_[static_cast<size_t>(rank)];
      part = data;
      if (rank == own) continue;
      KVASIR_ASSIGN_OR_RETURN(const char* const from,
                              mesh_->Receive(call, rank, count * kFloat));
      part = reinterpret_cast<const float*>(from);
    }
    SumInOrder(parts_, count, data);
    for (int64_t rank = 0; rank < shard().size; ++rank) {
      if (rank != own) KVASIR_RETURN_IF_ERROR(mesh_->Release(rank));
    }
    return absl::OkStatus();
  }

  // Sends elements [begin, end) of the columns as one message. Sends nothing if
  // there are none.
  absl::Status SendColumns(const GlooCall& call, const Columns& part,
                           int64_t begin, int64_t end) {
    if (begin >= end) return absl::OkStatus();
    KVASIR_ASSIGN_OR_RETURN(char* to, mesh_->BeginSend());
    part.ForRuns(begin, end, [&](const float* run, int64_t count) {
      const auto bytes = static_cast<size_t>(count * kFloat);
      std::memcpy(to, run, bytes);
      to += bytes;
    });
    return mesh_->Send(call, (end - begin) * kFloat);
  }

  absl::Status ReceiveColumns(const GlooCall& call, int64_t rank,
                              const Columns& part, int64_t begin, int64_t end) {
    if (begin >= end) return absl::OkStatus();
    KVASIR_ASSIGN_OR_RETURN(const char* from,
                            mesh_->Receive(call, rank, (end - begin) * kFloat));
    part.ForRuns(begin, end, [&](float* run, int64_t count) {
      const auto bytes = static_cast<size_t>(count * kFloat);
      std::memcpy(run, from, bytes);
      from += bytes;
    });
    return mesh_->Release(rank);
  }

  const std::shared_ptr<GlooMesh> mesh_;
  std::vector<const float*> parts_;  // one element per rank
  uint64_t calls_ = 0;
};

std::string DescribeGlooCall(const GlooCall& call) {
  return DescribeCall(static_cast<CollectiveKind>(call.kind), call.bytes);
}

}  // namespace

GlooGroup::GlooGroup(std::shared_ptr<GlooMesh> mesh) : mesh_(std::move(mesh)) {}

absl::StatusOr<std::unique_ptr<GlooGroup>> GlooGroup::Begin(
    const GlooOptions& options) {
  KVASIR_ASSIGN_OR_RETURN(std::unique_ptr<GlooMesh> mesh,
                          GlooMesh::Begin(options, &DescribeGlooCall));
  return std::unique_ptr<GlooGroup>(new GlooGroup(std::move(mesh)));
}

absl::StatusOr<std::unique_ptr<Collective>> GlooGroup::Connect(
    absl::Span<const std::string> addresses) {
  KVASIR_RETURN_IF_ERROR(mesh_->Connect(addresses));
  return MakeCpuCollective(std::make_unique<GlooCollective>(mesh_));
}

}  // namespace kvasir::worker
