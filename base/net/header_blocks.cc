#include "base/net/header_blocks.h"

#include <dlfcn.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>

#include "base/log.h"
#include "base/log_limit.h"
#include "base/mutex.h"

namespace kvasir::base {
namespace {

constexpr uint8_t kHeaders = 1;
constexpr uint8_t kContinuation = 9;
constexpr uint8_t kEndHeaders = 4;

// The state of the connection at one descriptor. It is used until another
// connection gets the same descriptor number.
struct Watched {
  // Needed because the acceptor may assign this object to a new connection
  // while a thread still scans for the previous one.
  Mutex mutex;
  bool on ABSL_GUARDED_BY(mutex) = false;
  ino_t inode ABSL_GUARDED_BY(mutex) = 0;
  HeaderBlockScanner scanner ABSL_GUARDED_BY(mutex);
};

// The watched connections, indexed by descriptor. The array is all zeros, so
// its pages take no memory until they are used.
std::array<std::atomic<Watched*>, kMaxDescriptors> watched_at = {};

std::atomic<uint64_t> num_refused = 0;

ino_t InodeAt(int descriptor) {
  struct stat file = {};
  return ::fstat(descriptor, &file) == 0 ? file.st_ino : 0;
}

void CountRefused() {
  ++num_refused;
  static LogLimit* const lines = new LogLimit;
  const auto unlogged = lines->Take("header block");
  if (!unlogged.has_value()) return;
  LogWarning(
      "closed a connection: its header block is too long",
      {{"limit_bytes", kMaxHeaderBlockBytes}, {"since_last_line", *unlogged}});
}

// Scans the bytes that were read. If a header block is too long, shuts the
// connection down and returns false.
bool ScanRead(int descriptor, const msghdr& message, size_t read_bytes) {
  if (descriptor < 0 || static_cast<size_t>(descriptor) >= kMaxDescriptors) {
    return true;
  }
  Watched* const watched = watched_at[static_cast<size_t>(descriptor)];
  if (watched == nullptr) return true;
  MutexLock lock(&watched->mutex);
  if (!watched->on) return true;
  // The peer has ended the connection.
  if (read_bytes == 0) watched->on = false;
  for (size_t i = 0; i < message.msg_iovlen && read_bytes > 0; ++i) {
    const iovec& part = message.msg_iov[i];
    const size_t size = std::min(part.iov_len, read_bytes);
    read_bytes -= size;
    if (watched->scanner.Scan(
            {static_cast<const char*>(part.iov_base), size})) {
      continue;
    }
    watched->on = false;
    // If gRPC has closed the connection meanwhile, the descriptor's number may
    // belong to another file, which must not be shut down.
    if (InodeAt(descriptor) != watched->inode) return true;
    CountRefused();
    ::shutdown(descriptor, SHUT_RDWR);
    return false;
  }
  return true;
}

void DeleteScanner(void*, void* scanner, CRYPTO_EX_DATA*, int, long, void*) {
  delete static_cast<HeaderBlockScanner*>(scanner);
}

// Scans what a TLS server has read from a client. Returns false if a header
// block is too long.
bool ScanDecrypted(SSL* ssl, absl::string_view bytes) {
  static const int index =
      SSL_get_ex_new_index(0, nullptr, nullptr, nullptr, &DeleteScanner);
  auto* scanner = static_cast<HeaderBlockScanner*>(SSL_get_ex_data(ssl, index));
  if (scanner == nullptr) {
    auto fresh = std::make_unique<HeaderBlockScanner>();
    scanner = fresh.get();
    if (SSL_set_ex_data(ssl, index, scanner) != 1) return false;
    fresh.release();
  }
  if (scanner->Scan(bytes)) return true;
  CountRefused();
  return false;
}

template <typename Function>
Function* LibraryFunction(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

bool HeaderBlockScanner::Scan(absl::string_view bytes) {
  while (!bytes.empty() && !too_long_) {
    const size_t preface =
        std::min<size_t>(kPrefaceBytes - preface_bytes_, bytes.size());
    preface_bytes_ += static_cast<uint32_t>(preface);
    bytes.remove_prefix(preface);
    const size_t payload = std::min<size_t>(payload_bytes_, bytes.size());
    payload_bytes_ -= static_cast<uint32_t>(payload);
    bytes.remove_prefix(payload);
    const size_t header = std::min(frame_.size() - frame_bytes_, bytes.size());
    std::copy_n(bytes.begin(), header, frame_.begin() + frame_bytes_);
    frame_bytes_ += header;
    bytes.remove_prefix(header);
    if (frame_bytes_ == frame_.size()) BeginFrame();
  }
  return !too_long_;
}

void HeaderBlockScanner::BeginFrame() {
  frame_bytes_ = 0;
  payload_bytes_ = uint32_t{frame_[0]} << 16 | uint32_t{frame_[1]} << 8 |
                   uint32_t{frame_[2]};
  const uint8_t type = frame_[3];
  if (type == kHeaders) block_bytes_ = 0;
  if (type != kHeaders && type != kContinuation) return;
  block_bytes_ += static_cast<uint32_t>(frame_.size()) + payload_bytes_;
  too_long_ = block_bytes_ > kMaxHeaderBlockBytes;
  if ((frame_[4] & kEndHeaders) != 0) block_bytes_ = 0;
}

void LimitHeaderBlocks(int connection) {
  if (static_cast<size_t>(connection) >= kMaxDescriptors) return;
  std::atomic<Watched*>& at = watched_at[static_cast<size_t>(connection)];
  if (at == nullptr) at = new Watched;
  Watched* const watched = at;
  MutexLock lock(&watched->mutex);
  watched->scanner = {};
  watched->inode = InodeAt(connection);
  watched->on = true;
}

uint64_t NumHeaderBlocksRefused() { return num_refused; }

std::vector<prometheus::MetricFamily> HeaderBlockMetrics::Collect() const {
  prometheus::MetricFamily family;
  family.name = "kvasir_header_blocks_refused_total";
  family.help =
      "Connections closed because a header block of HTTP/2 was too long";
  family.type = prometheus::MetricType::Counter;
  family.metric.emplace_back().counter.value =
      static_cast<double>(NumHeaderBlocksRefused());
  return {family};
}

}  // namespace kvasir::base

// gRPC calls these two functions instead of the libraries' own. They scan what
// servers read, and only forward all other calls.
extern "C" ssize_t recvmsg(int descriptor, msghdr* message, int flags) {
  using kvasir::base::LibraryFunction;
  static auto* const real = LibraryFunction<decltype(recvmsg)>("recvmsg");
  const ssize_t read = real(descriptor, message, flags);
  if (read < 0 || (flags & (MSG_PEEK | MSG_ERRQUEUE)) != 0 ||
      kvasir::base::ScanRead(descriptor, *message, static_cast<size_t>(read))) {
    return read;
  }
  errno = ECONNRESET;
  return -1;
}

extern "C" int SSL_read(SSL* ssl, void* bytes, int size) {
  using kvasir::base::LibraryFunction;
  static auto* const real = LibraryFunction<decltype(SSL_read)>("SSL_read");
  const int read = real(ssl, bytes, size);
  if (read <= 0 || SSL_is_server(ssl) == 0 ||
      kvasir::base::ScanDecrypted(
          ssl, {static_cast<const char*>(bytes), static_cast<size_t>(read)})) {
    return read;
  }
  // SSL_get_error reports this error, which ends the connection.
  ERR_raise(ERR_LIB_SSL, SSL_R_EXCESSIVE_MESSAGE_SIZE);
  return -1;
}
