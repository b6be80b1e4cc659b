// A limit on HTTP/2 header blocks, which gRPC 1.51 has not: it keeps what a
// block brings until END_HEADERS, before it looks at any credential. A peer
// that sends HEADERS and then CONTINUATION frames without end takes memory from
// all connections.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"
#include "prometheus/collectable.h"
#include "prometheus/metric_family.h"

namespace kvasir::base {

// Four times the metadata that a server takes, so that gRPC's own limit comes
// first for peers that end their blocks.
inline constexpr uint32_t kMaxHeaderBlockBytes = 64 << 10;

// Descriptors above are not scanned; a process has no more of them
// (RaiseDescriptorLimit).
inline constexpr size_t kMaxDescriptors = 1 << 20;

// Follows the frames of one connection's client, which begin with the preface
// of HTTP/2 (RFC 9113, 3.4 and 4.1). Bytes of another protocol are gRPC's to
// refuse.
// Threads: one at a time.
class HeaderBlockScanner {
 public:
  // The next bytes that the client sent. False from the first frame on that
  // makes a header block longer than kMaxHeaderBlockBytes, frame headers
  // included.
  bool Scan(absl::string_view bytes);

 private:
  void BeginFrame();

  static constexpr uint32_t kPrefaceBytes = 24;

  // Of the preface, as far as they have come.
  uint32_t preface_bytes_ = 0;
  // Of the frame's payload, still to come.
  uint32_t payload_bytes_ = 0;
  // Of the header block that is open, from its HEADERS on.
  uint32_t block_bytes_ = 0;
  // The header of the next frame, as far as it has come.
  std::array<uint8_t, 9> frame_ = {};
  size_t frame_bytes_ = 0;
  bool too_long_ = false;
};

// Scans what gRPC reads from a connection of a plain-text server, given its
// descriptor, from now until the connection ends. If a header block is too
// long, the connection is shut down, counted, and logged at most once a minute.
// Connections of TLS servers are scanned without being named.
//
// gRPC gives no place for this. It calls recvmsg() and SSL_read() through the
// dynamic linker, so a program that links this library has its own functions of
// these names, which call the libraries' (header_blocks.cc).
// Threads: any thread, before gRPC has the descriptor.
void LimitHeaderBlocks(int connection);

// kvasir_header_blocks_refused_total: of the process, all listeners together.
// Threads: any thread.
class HeaderBlockMetrics final : public prometheus::Collectable {
 public:
  std::vector<prometheus::MetricFamily> Collect() const override;
};

// Connections that were closed for a header block.
uint64_t NumHeaderBlocksRefused();

}  // namespace kvasir::base
