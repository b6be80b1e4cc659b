// Limits the size of HTTP/2 header blocks, which gRPC 1.51 cannot do. gRPC
// keeps a block in memory until it ends (flag END_HEADERS), and checks
// credentials only then. So a peer that sends HEADERS and then endless
// CONTINUATION frames could use up the memory of all connections.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"
#include "prometheus/collectable.h"
#include "prometheus/metric_family.h"

namespace kvasir::base {

// The longest header block: four times a server's default metadata limit
// (GrpcServerOptions). So if a block is only a little too large for gRPC, gRPC
// itself refuses it.
inline constexpr uint32_t kMaxHeaderBlockBytes = 64 << 10;

// Connections whose descriptor number is this large or larger are not scanned.
inline constexpr size_t kMaxDescriptors = 1 << 20;

// Parses the frames that the client of one connection sends, beginning
// with the preface of HTTP/2 (RFC 9113, 3.4 and 4.1). gRPC itself refuses
// other protocols.
// Threads: only one thread at a time may use it.
class HeaderBlockScanner {
 public:
  // Scans the next bytes of the client. Returns false once a frame
  // has made a header block, including its frame headers, longer
  // than kMaxHeaderBlockBytes.
  bool Scan(absl::string_view bytes);

 private:
  void BeginFrame();

  static constexpr uint32_t kPrefaceBytes = 24;

  // Bytes of the preface that have arrived.
  uint32_t preface_bytes_ = 0;
  // Bytes of the current frame's payload that have not arrived yet.
  uint32_t payload_bytes_ = 0;
  // Bytes of the current header block since its HEADERS frame; 0 after its end.
  uint32_t block_bytes_ = 0;
  // The header of the next frame, as far as it has arrived.
  std::array<uint8_t, 9> frame_ = {};
  size_t frame_bytes_ = 0;
  bool too_long_ = false;
};

// Scans everything that gRPC reads from this connection of a plain-text server,
// until the connection ends. If a header block is too long, the connection is
// shut down and counted; a log line follows at most once a minute. Connections
// of TLS servers are always scanned, without this call.
//
// gRPC has no hook for the bytes that it reads, but it calls recvmsg() and
// SSL_read() through the dynamic linker. This library therefore defines
// functions of these names, which call the real ones and scan the bytes that
// they return.
//
// Threads: any thread may call it, before gRPC receives the descriptor.
void LimitHeaderBlocks(int connection);

// Exports kvasir_header_blocks_refused_total, the sum over all listeners of
// the process.
// Threads: its methods may be called from any thread.
class HeaderBlockMetrics final : public prometheus::Collectable {
 public:
  std::vector<prometheus::MetricFamily> Collect() const override;
};

// Returns how many connections were closed because a header block was too long.
uint64_t NumHeaderBlocksRefused();

}  // namespace kvasir::base
