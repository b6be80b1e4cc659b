#include "worker/ranks/gloo/gloo_mesh.h"

#include <gloo/transport/address.h>
#include <gloo/transport/context.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/address.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <exception>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/sha256.h"
#include "base/status_macros.h"
#include "worker/collective/cpu_collective.h"

namespace kvasir::worker {
namespace {

using std::chrono::milliseconds;

// The Gloo slots (tags) of messages. Gloo assigns the messages of one sender
// and slot to receive buffers in order.
enum Slot : uint64_t { kData = 1, kControl = 2, kProbe = 3 };

// Values of GlooCall::kind for messages that do not belong to a collective
// call. These numbers are sent over the network: do not renumber.
constexpr uint32_t kHello = 0x100;
constexpr uint32_t kGaveUp = 0x101;

struct Header {
  uint64_t token = 0;  // identifies the sender within this group
  uint64_t call = 0;
  int64_t call_bytes = 0;
  uint32_t kind = 0;
  uint32_t payload_bytes = 0;
};
static_assert(sizeof(Header) == 32);

// The size of a control message: a Header and the reason to end the group.
constexpr size_t kControlBytes = 512;
constexpr size_t kAlignmentBytes = 64;

// The size of the header that Gloo sends before each message. Gloo also sends
// as many bytes to announce each send and each receive.
constexpr int64_t kPreambleBytes = 48;

// Stands for no timeout, because Gloo does not wait at all if the timeout is 0.
constexpr milliseconds kForever = std::chrono::hours(24 * 365 * 10);
// A failed connection wakes the calling thread and the watcher thread (Watch)
// at the same time. The calling thread waits this long for the error that the
// watcher finds.
constexpr std::chrono::seconds kVerdictTimeout(1);

milliseconds ToMs(std::chrono::steady_clock::duration duration) {
  return std::max(milliseconds(1), std::chrono::ceil<milliseconds>(duration));
}

std::chrono::steady_clock::duration ToSteady(absl::Duration duration) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(
      absl::ToChronoNanoseconds(duration));
}

// Returns the exception's text without the position in Gloo's source:
// "Connection closed" for "[/build/pair.cc:534] Connection closed".
std::string TextOf(const std::exception& thrown) {
  const std::string text = thrown.what();
  const size_t end = text.find("] ");
  return text.rfind('[', 0) == 0 && end != std::string::npos
             ? text.substr(end + 2)
             : text;
}

absl::StatusOr<std::string> MakeSecret() {
  std::string bytes(16, '\0');
  if (getrandom(bytes.data(), bytes.size(), 0) !=
      static_cast<ssize_t>(bytes.size())) {
    return absl::UnavailableError(
        absl::StrCat("cannot get random numbers: ", std::strerror(errno)));
  }
  return absl::BytesToHexString(bytes);
}

absl::Status CheckOptions(const GlooOptions& options) {
  const plan::TpShard shard = options.shard;
  if (shard.size < 2 || shard.size > kMaxGlooRanks || shard.rank < 0 ||
      shard.rank >= shard.size) {
    return absl::InvalidArgumentError(
        absl::StrCat("Gloo: there is no rank ", shard.rank, " of ", shard.size,
                     ": want 2 to ", kMaxGlooRanks, " ranks, numbered from 0"));
  }
  constexpr int64_t kMaxChunkBytes = 64 << 20;
  if (options.chunk_bytes < 4 || options.chunk_bytes > kMaxChunkBytes ||
      options.chunk_bytes % 4 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "chunk_bytes is ", options.chunk_bytes,
        ", but must be a multiple of 4 from 4 to ", kMaxChunkBytes));
  }
  const std::pair<const char*, absl::Duration> timeouts[] = {
      {"connect_timeout", options.connect_timeout},
      {"call_timeout", options.call_timeout}};
  for (const auto& [name, timeout] : timeouts) {
    if (timeout < absl::Milliseconds(1) || timeout > absl::Hours(24)) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, " is ", absl::FormatDuration(timeout),
                       ", but must be 1ms to 24h"));
    }
  }
  struct sigaction action = {};
  if (sigaction(SIGPIPE, nullptr, &action) != 0 ||
      action.sa_handler == SIG_DFL) {
    return absl::FailedPreconditionError(
        "SIGPIPE has its default action, which would end this process when "
        "another rank is gone: the process must ignore or handle SIGPIPE");
  }
  return absl::OkStatus();
}

}  // namespace

GlooMesh::GlooMesh(const GlooOptions& options,
                   std::function<std::string(const GlooCall&)> describe)
    : options_(options),
      describe_(std::move(describe)),
      peers_(static_cast<size_t>(options.shard.size)),
      timeout_(ToSteady(options.connect_timeout)) {}

absl::StatusOr<std::unique_ptr<GlooMesh>> GlooMesh::Begin(
    const GlooOptions& options,
    std::function<std::string(const GlooCall&)> describe) {
  KVASIR_RETURN_IF_ERROR(CheckOptions(options));
  KVASIR_ASSIGN_OR_RETURN(const SocketAddress at,
                          FindInterface(options.interface));
  std::unique_ptr<GlooMesh> mesh(new GlooMesh(options, std::move(describe)));
  KVASIR_RETURN_IF_ERROR(mesh->Listen(at));
  return mesh;
}

absl::Status GlooMesh::Listen(const SocketAddress& at) {
  GlooAddress address = {.shard = shard(), .chunk_bytes = chunk_bytes()};
  KVASIR_ASSIGN_OR_RETURN(address.secret, MakeSecret());
  try {
    // We fill in the attributes ourselves, because Gloo's look-up by name reads
    // invalid memory if the name does not exist.
    gloo::transport::tcp::attr attributes;
    attributes.ai_family = at.bytes.ss_family;
    attributes.ai_socktype = SOCK_STREAM;
    attributes.ai_protocol = 0;
    attributes.ai_addr = at.bytes;
    attributes.ai_addrlen = static_cast<int>(at.size);
    device_ = std::make_shared<gloo::transport::tcp::Device>(attributes);
    context_ = device_->createContext(static_cast<int>(shard().rank),
                                      static_cast<int>(shard().size));
    // Gloo waits for a connection five times as long as this timeout says.
    context_->setTimeout(ToMs(timeout_ / 5));
    for (int64_t rank = 0; rank < shard().size; ++rank) {
      SocketAddress port;
      if (rank != shard().rank) {
        const auto& pair = context_->createPair(static_cast<int>(rank));
        port.bytes =
            static_cast<const gloo::transport::tcp::Address&>(pair->address())
                .getSockaddr();
        port.size = at.size;
      }
      address.ports.push_back(port);
    }
  } catch (const std::exception& thrown) {
    return absl::UnavailableError(absl::StrCat(
        "Gloo cannot listen on ", options_.interface, ": ", TextOf(thrown)));
  }
  address_ = FormatGlooAddress(address);
  return absl::OkStatus();
}

GlooMesh::~GlooMesh() {
  if (watcher_.joinable()) {
    control_in_.buffer->abortWaitRecv();
    watcher_.join();
  }
  // Frees the context, to which the buffers hold references. That closes the
  // connections; data that was written before is still sent.
  peers_.clear();
  for (Place& place : outbox_) place.buffer = nullptr;
  control_in_.buffer = nullptr;
  control_out_.buffer = nullptr;
  context_ = nullptr;
  device_ = nullptr;
}

absl::Status GlooMesh::Connect(absl::Span<const std::string> addresses) {
  const Clock::time_point deadline = Clock::now() + timeout_;
  KVASIR_RETURN_IF_ERROR(ReadAddresses(addresses));
  KVASIR_RETURN_IF_ERROR(ConnectPairs(deadline));
  KVASIR_RETURN_IF_ERROR(Try(-1, [&] {
    MakePlaces();
    for (int64_t rank = 0; rank < shard().size; ++rank) {
      if (rank == shard().rank) continue;
      for (const Place& place : peers_[static_cast<size_t>(rank)].inbox) {
        Post(place, rank);
      }
      control_in_.buffer->recv(static_cast<int>(rank), kControl,
                               static_cast<size_t>(rank) * kControlBytes,
                               kControlBytes);
      sent_bytes_.fetch_add(kPreambleBytes, std::memory_order_relaxed);
    }
  }));
  {
    base::MutexLock lock(&mutex_);
    if (!failure_.ok()) return failure_;
    places_made_ = true;
  }
  watcher_ = std::thread([this] { Watch(); });
  KVASIR_RETURN_IF_ERROR(Greet());
  timeout_ = ToSteady(options_.call_timeout);
  waited_ = 0;
  return absl::OkStatus();
}

absl::Status GlooMesh::ReadAddresses(absl::Span<const std::string> addresses) {
  if (addresses.size() != peers_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(addresses.size(),
                     " addresses were given for a tensor-parallel group of ",
                     shard().size, " ranks"));
  }
  for (int64_t rank = 0; rank < shard().size; ++rank) {
    const std::string& text = addresses[static_cast<size_t>(rank)];
    const std::string prefix =
        absl::StrCat("address of tensor-parallel rank ", rank, ": ");
    const absl::StatusOr<GlooAddress> address = ParseGlooAddress(text);
    if (!address.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(prefix, address.status().message()));
    }
    const plan::TpShard want = {rank, shard().size};
    if (address->shard != want) {
      return absl::InvalidArgumentError(absl::StrCat(
          prefix, "belongs to rank ", address->shard.rank, " of ",
          address->shard.size, ", not to rank ", rank, " of ", want.size));
    }
    if (address->chunk_bytes != chunk_bytes()) {
      return absl::InvalidArgumentError(absl::StrCat(
          prefix, "has chunks of ", address->chunk_bytes, " bytes, but rank ",
          shard().rank, " has chunks of ", chunk_bytes(), " bytes"));
    }
    if (rank == shard().rank && text != address_) {
      return absl::InvalidArgumentError(absl::StrCat(
          prefix, "differs from the address that this process has created"));
    }
    ports_.push_back(address->ports[static_cast<size_t>(shard().rank)]);
  }
  const std::string all = absl::StrJoin(addresses, "\n");
  for (int64_t rank = 0; rank < shard().size; ++rank) {
    const std::string digits =
        base::Sha256Hex(absl::StrCat(all, "\n", rank)).substr(0, 16);
    uint64_t token = 0;
    (void)absl::SimpleHexAtoi(digits, &token);
    peers_[static_cast<size_t>(rank)].token = token;
  }
  token_ = peers_[static_cast<size_t>(shard().rank)].token;
  return absl::OkStatus();
}

absl::Status GlooMesh::ConnectPairs(Clock::time_point deadline) {
  for (int64_t rank = 0; rank < shard().size; ++rank) {
    if (rank == shard().rank) continue;
    const auto lost = [&](const std::string& text) {
      return absl::UnavailableError(absl::StrCat("tensor-parallel rank ", rank,
                                                 " cannot be reached: ", text));
    };
    KVASIR_RETURN_IF_ERROR(failure());
    if (Clock::now() >= deadline) {
      return lost(absl::StrCat("not all ranks were connected within ",
                               absl::FormatDuration(options_.connect_timeout)));
    }
    try {
      const gloo::transport::tcp::Address to(
          ports_[static_cast<size_t>(rank)].bytes);
      context_->getPair(static_cast<int>(rank))->connect(to.bytes());
    } catch (const std::exception& thrown) {
      KVASIR_RETURN_IF_ERROR(failure());
      return lost(TextOf(thrown));
    }
  }
  return failure();
}

void GlooMesh::ClosePairs() {
  for (int64_t rank = 0; rank < shard().size; ++rank) {
    if (rank == shard().rank) continue;
    try {
      context_->getPair(static_cast<int>(rank))->close();
    } catch (const std::exception&) {
      // The connection was already closed.
    }
  }
}

void GlooMesh::MakePlaces() {
  const size_t message = (sizeof(Header) + static_cast<size_t>(chunk_bytes()) +
                          kAlignmentBytes - 1) /
                         kAlignmentBytes * kAlignmentBytes;
  const size_t size = peers_.size();
  memory_.resize(2 * size * message + (size + 1) * kControlBytes);
  char* next = memory_.data();
  const auto make = [&](Place& place, size_t bytes) {
    place.memory = next;
    place.buffer = context_->createUnboundBuffer(next, bytes);
    next += bytes;
  };
  for (int64_t rank = 0; rank < shard().size; ++rank) {
    if (rank == shard().rank) continue;
    for (Place& place : peers_[static_cast<size_t>(rank)].inbox) {
      make(place, message);
    }
  }
  for (Place& place : outbox_) make(place, message);
  make(control_in_, size * kControlBytes);
  make(control_out_, kControlBytes);
}

// Exchanges a hello with every rank. A rank can send a valid hello only if it
// knows all addresses, so this proves that it belongs to the group.
absl::Status GlooMesh::Greet() {
  const GlooCall hello = {.kind = kHello};
  KVASIR_RETURN_IF_ERROR(BeginSend().status());
  KVASIR_RETURN_IF_ERROR(Send(hello, 0));
  for (int64_t rank = 0; rank < shard().size; ++rank) {
    if (rank == shard().rank) continue;
    KVASIR_RETURN_IF_ERROR(Receive(hello, rank, 0).status());
    KVASIR_RETURN_IF_ERROR(Release(rank));
  }
  return absl::OkStatus();
}

void GlooMesh::Post(const Place& place, int64_t from) {
  place.buffer->recv(static_cast<int>(from), kData, 0,
                     sizeof(Header) + static_cast<size_t>(chunk_bytes()));
  sent_bytes_.fetch_add(kPreambleBytes, std::memory_order_relaxed);
}

void GlooMesh::SendTo(const Place& place, int64_t to, uint64_t slot,
                      size_t bytes) {
  place.buffer->send(static_cast<int>(to), slot, 0, bytes);
  sent_bytes_.fetch_add(2 * kPreambleBytes + static_cast<int64_t>(bytes),
                        std::memory_order_relaxed);
}

absl::StatusOr<char*> GlooMesh::BeginSend() {
  const size_t which = sent_ % 2;
  const Place& place = outbox_[which];
  KVASIR_RETURN_IF_ERROR(failure());
  for (; sending_[which] > 0; --sending_[which]) {
    KVASIR_RETURN_IF_ERROR(
        WaitFor(shard().size == 2 ? 1 - shard().rank : -1,
                [&](milliseconds ms) { return place.buffer->waitSend(ms); }));
  }
  return place.memory + sizeof(Header);
}

absl::Status GlooMesh::Send(const GlooCall& call, int64_t payload_bytes) {
  const size_t which = sent_ % 2;
  const Place& place = outbox_[which];
  const Header header = {token_, call.number, call.bytes, call.kind,
                         static_cast<uint32_t>(payload_bytes)};
  std::memcpy(place.memory, &header, sizeof(header));
  ++sent_;
  for (int64_t rank = 0; rank < shard().size; ++rank) {
    if (rank == shard().rank) continue;
    KVASIR_RETURN_IF_ERROR(Try(rank, [&] {
      SendTo(place, rank, kData,
             sizeof(header) + static_cast<size_t>(payload_bytes));
    }));
    ++sending_[which];
  }
  return absl::OkStatus();
}

absl::StatusOr<const char*> GlooMesh::Receive(const GlooCall& call,
                                              int64_t from,
                                              int64_t payload_bytes) {
  Peer& peer = peers_[static_cast<size_t>(from)];
  const Place& place = peer.inbox[peer.received % 2];
  KVASIR_RETURN_IF_ERROR(failure());
  KVASIR_RETURN_IF_ERROR(WaitFor(
      from, [&](milliseconds ms) { return place.buffer->waitRecv(ms); }));
  KVASIR_RETURN_IF_ERROR(CheckHeader(place, call, from, payload_bytes));
  return place.memory + sizeof(Header);
}

absl::Status GlooMesh::Release(int64_t from) {
  Peer& peer = peers_[static_cast<size_t>(from)];
  const Place& place = peer.inbox[peer.received++ % 2];
  return Try(from, [&] { Post(place, from); });
}

absl::Status GlooMesh::CheckHeader(const Place& place, const GlooCall& call,
                                   int64_t from, int64_t payload_bytes) {
  Header header;
  std::memcpy(&header, place.memory, sizeof(header));
  if (header.token != peers_[static_cast<size_t>(from)].token) {
    return Fail(absl::InternalError(absl::StrCat(
        "the process that connected as tensor-parallel rank ", from,
        " does not belong to this group: its token is wrong")));
  }
  if (header.call == call.number && header.kind == call.kind &&
      header.call_bytes == call.bytes &&
      header.payload_bytes == payload_bytes) {
    return absl::OkStatus();
  }
  const auto describe = [&](const GlooCall& each, int64_t payload) {
    return absl::StrCat("call ", each.number, ", ", describe_(each),
                        ", a message of ", payload, " bytes");
  };
  return Fail(absl::InternalError(absl::StrCat(
      "tensor-parallel ranks make different calls: rank ", from, " is in ",
      describe({header.call, header.kind, header.call_bytes},
               header.payload_bytes),
      "; rank ", shard().rank, " is in ", describe(call, payload_bytes))));
}

template <typename Body>
absl::Status GlooMesh::Try(int64_t peer, const Body& body) {
  try {
    body();
    return absl::OkStatus();
  } catch (const std::exception& thrown) {
    return Verdict(peer, TextOf(thrown));
  }
}

template <typename Wait>
absl::Status GlooMesh::WaitFor(int64_t peer, const Wait& wait) {
  const Clock::time_point begin = Clock::now();
  const Clock::time_point deadline = begin + timeout_;
  {
    base::MutexLock lock(&mutex_);
    deadline_ = deadline;
  }
  std::string text;
  bool done = false;
  try {
    done = wait(ToMs(timeout_));
  } catch (const std::exception& thrown) {
    text = TextOf(thrown);
  }
  {
    base::MutexLock lock(&mutex_);
    deadline_.reset();
  }
  waited_.fetch_add((Clock::now() - begin).count(), std::memory_order_relaxed);
  if (done) return absl::OkStatus();
  // The wait ended without a message and without an exception: WakeAll has
  // ended it, so the group has failed.
  if (text.empty()) return failure();
  if (Clock::now() < deadline) return Verdict(peer, text);
  const std::string name = peer < 0
                               ? "a tensor-parallel rank"
                               : absl::StrCat("tensor-parallel rank ", peer);
  return Fail(absl::UnavailableError(
      absl::StrCat(name, " did not respond for ",
                   absl::FormatDuration(absl::FromChrono(timeout_)))));
}

void GlooMesh::Watch() {
  int from = -1;
  try {
    if (!control_in_.buffer->waitRecv(&from, kForever)) return;
  } catch (const std::exception& thrown) {
    {
      base::MutexLock lock(&mutex_);
      // A call that waits has reached its deadline, so Gloo has closed all
      // connections. The thread that makes the call sets the error, not this
      // thread.
      if (deadline_.has_value() && Clock::now() >= *deadline_) {
        watcher_left_ = true;
        verdict_.SignalAll();
        return;
      }
    }
    const std::optional<int64_t> lost = FindLost();
    (void)Fail(absl::UnavailableError(absl::StrCat(
        lost.has_value() ? absl::StrCat("tensor-parallel rank ", *lost)
                         : "a tensor-parallel rank",
        " is gone: ", TextOf(thrown))));
    return;
  }
  const char* const memory =
      control_in_.memory + static_cast<size_t>(from) * kControlBytes;
  Header header;
  std::memcpy(&header, memory, sizeof(header));
  if (header.token != peers_[static_cast<size_t>(from)].token ||
      header.kind != kGaveUp ||
      header.payload_bytes > kControlBytes - sizeof(header)) {
    (void)Fail(absl::InternalError(absl::StrCat(
        "tensor-parallel rank ", from,
        " sent a control message that is not valid in this group")));
    return;
  }
  (void)Fail(
      RankGaveUp(from, absl::UnknownError(absl::string_view(
                           memory + sizeof(header), header.payload_bytes))));
}

std::optional<int64_t> GlooMesh::FindLost() {
  for (int64_t rank = 0; rank < shard().size; ++rank) {
    if (rank == shard().rank) continue;
    try {
      control_in_.buffer->recv(static_cast<int>(rank), kProbe, 0, 0);
    } catch (const std::exception&) {
      return rank;
    }
  }
  return std::nullopt;
}

absl::Status GlooMesh::Verdict(int64_t peer, const std::string& text) {
  {
    base::MutexLock lock(&mutex_);
    const Clock::time_point until = Clock::now() + kVerdictTimeout;
    while (failure_.ok() && !watcher_left_ && watcher_.joinable() &&
           Clock::now() < until) {
      verdict_.WaitWithTimeout(&mutex_, absl::FromChrono(until - Clock::now()));
    }
  }
  const std::string name = peer < 0
                               ? "a tensor-parallel rank"
                               : absl::StrCat("tensor-parallel rank ", peer);
  return Fail(absl::UnavailableError(absl::StrCat(name, " is gone: ", text)));
}

absl::Status GlooMesh::Fail(const absl::Status& failure) {
  absl::Status died_of;
  {
    base::MutexLock lock(&mutex_);
    if (failure_.ok()) failure_ = failure;
    died_of = failure_;
    verdict_.SignalAll();
  }
  WakeAll();
  return died_of;
}

absl::Status GlooMesh::failure() {
  base::MutexLock lock(&mutex_);
  return failure_;
}

void GlooMesh::WakeAll() {
  {
    base::MutexLock lock(&mutex_);
    if (!places_made_) return;
  }
  for (const Peer& peer : peers_) {
    for (const Place& place : peer.inbox) {
      if (place.buffer != nullptr) place.buffer->abortWaitRecv();
    }
  }
  for (const Place& place : outbox_) {
    if (place.buffer != nullptr) place.buffer->abortWaitSend();
  }
}

void GlooMesh::Abort(const absl::Status& reason) {
  (void)Fail(RankGaveUp(shard().rank, reason));
  bool connecting = false;
  {
    base::MutexLock lock(&mutex_);
    if (std::exchange(abort_sent_, true)) return;
    connecting = !places_made_;
  }
  if (connecting) {
    // No message can be sent before all ranks are connected. Closing the
    // connections shows the other ranks that the group has failed.
    ClosePairs();
    return;
  }
  const std::string text(
      reason.message().substr(0, kControlBytes - sizeof(Header)));
  const Header header = {.token = token_,
                         .kind = kGaveUp,
                         .payload_bytes = static_cast<uint32_t>(text.size())};
  std::memcpy(control_out_.memory, &header, sizeof(header));
  std::memcpy(control_out_.memory + sizeof(header), text.data(), text.size());
  for (int64_t rank = 0; rank < shard().size; ++rank) {
    if (rank == shard().rank) continue;
    try {
      SendTo(control_out_, rank, kControl, sizeof(header) + text.size());
    } catch (const std::exception&) {
      // The other rank is gone and needs no message.
    }
  }
  control_in_.buffer->abortWaitRecv();
}

}  // namespace kvasir::worker
