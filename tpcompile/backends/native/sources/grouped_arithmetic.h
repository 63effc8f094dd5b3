// How values are held, and how integers of weights are multiplied by them. Included by grouped.h.

// Sums of products of integers.
struct Integers {
  using Sum = int32_t;
  using Sums = IntRegister;

  // Return sums less their offsets, given the sums of values.
  static TPC_INLINE Register less(Sums total, IntRegister offsets, const Sum* sums) {
    return numbers(total - offsets * load_bytes<IntRegister>(sums));
  }

  static TPC_INLINE Register numbers(Sums total) {
    return __builtin_convertvector(total, Register);
  }

  static TPC_INLINE Register of_sums(const Sum* sums) {
    return numbers(load_bytes<IntRegister>(sums));
  }
};

// An arithmetic: how values are held, and how the integers of a load become parts that they are
// multiplied by. Those of a part are raised by `kRaised`. This one has values of 16 bits.
struct Exact : Integers {
  using Value = int16_t;
  static constexpr int kBitsOfValues = 16;
  template <int kBits>
  static constexpr int32_t kRaised = kBits == 8 ? 0 : 1 << (kBits - 1);

  template <int kBits>
  static TPC_INLINE ShortRegister part(ShortRegister loaded, int number) {
    if constexpr (kBits == 8) return (number ? loaded : loaded << 8) >> 8;
    const auto found = (ShortRegister)((WordRegister)loaded >> (4 * number));
    return number < 3 ? found & 15 : found;
  }

  template <int kBits>
  static TPC_INLINE Sums multiply(Sums total, ShortRegister weight, ShortRegister x) {
    return multiply_add(total, weight, x);
  }
};

// Values as integers of 8 bits.
struct Bytes : Integers {
  using Value = int8_t;
  static constexpr int kBitsOfValues = 8;
  template <int kBits>
  static constexpr int32_t kRaised = kRaisedBytes<kBits>;

  template <int kBits>
  static TPC_INLINE ShortRegister part(ShortRegister loaded, int number) {
    constexpr int16_t kNibbles = 0x0f0f, kHighest = static_cast<int16_t>(0x8080);
    if constexpr (kBits == 4) return (number ? loaded >> 4 : loaded) & kNibbles;
    else return kSignedBytes ? loaded : loaded ^ kHighest;
  }

  template <int kBits>
  static TPC_INLINE Sums multiply(Sums total, ShortRegister weight, ShortRegister x) {
    return multiply_bytes<kBits == 8 && kSignedBytes>(total, weight, x);
  }
};

// Values in fp32, those of even lanes before those of odd ones.
struct Wide {
  using Value = float;
  using Sum = float;
  using Sums = Register;
  static constexpr int kBitsOfValues = 16;  // of their columns in a register
  template <int kBits>
  static constexpr int32_t kRaised = Exact::kRaised<kBits>;

  template <int kBits>
  static TPC_INLINE ShortRegister part(ShortRegister loaded, int number) {
    return Exact::part<kBits>(loaded, number);
  }

  static TPC_INLINE Sums add(Sums total, ShortRegister weight, const Value* x) {
    const auto pairs = (IntRegister)weight;
    const Register even = __builtin_convertvector((pairs << 16) >> 16, Register);
    const Register odd = __builtin_convertvector(pairs >> 16, Register);
    total = multiply_add(total, even, load_register(x));
    return multiply_add(total, odd, load_register(x + kLanes));
  }

  static TPC_INLINE Register less(Sums total, IntRegister offsets, const Sum* sums) {
    return total - __builtin_convertvector(offsets, Register) * load_register(sums);
  }

  static TPC_INLINE Register numbers(Sums total) { return total; }

  static TPC_INLINE Register of_sums(const Sum* sums) { return load_register(sums); }
};

// The parts of a load, and the columns of a part.
template <class A, int kBits>
constexpr int kParts = A::kBitsOfValues / kLow<kBits>;
template <class A, int kBits>
constexpr int64_t kOfPart = kColumns<kBits> / kParts<A, kBits>;

// The bits of a load that are apart, those of four columns in each lane of 16 bits.
typedef uint8_t Quarter __attribute__((vector_size(kRegister)));
typedef uint8_t Half __attribute__((vector_size(2 * kRegister)));

template <class A, int kBits>
TPC_INLINE ShortRegister load_high(const char* from) {
  ShortRegister found{};
  if constexpr (kHigh<kBits> == 2) {
    found = (ShortRegister)__builtin_convertvector(load_bytes<Half>(from), WordRegister);
  } else if constexpr (kHigh<kBits> == 1) {
    const auto pairs = __builtin_convertvector(load_bytes<Quarter>(from), IntRegister);
    found = (ShortRegister)((pairs | pairs << 12) & 0x000f000f);
  }
  // Parts of bytes have the first and third column of a lane, then the second and fourth.
  if constexpr (std::is_same_v<A, Bytes>) found |= found << (8 - 2 * kHigh<kBits>);
  return found;
}

// A part with the bits that are apart.
template <class A, int kBits>
TPC_INLINE ShortRegister with_high(ShortRegister found, ShortRegister high, int number) {
  if constexpr (kHigh<kBits> == 0) {
    return found;
  } else {
    constexpr int16_t kOne = ((1 << kHigh<kBits>) - 1) << 4;
    constexpr int16_t kPlaces = std::is_same_v<A, Bytes> ? kOne | kOne << 8 : kOne;
    const int up = 4 - kHigh<kBits> * number;
    const auto moved = up >= 0 ? high << up : (ShortRegister)((WordRegister)high >> -up);
    return found | (moved & kPlaces);
  }
}

// Products of values in T and weights of few bits. See grouped_values.h for how values are
// laid out.
template <class T>
struct Form<T, Grouped> {
  using Weights = Grouped;
  using Value = float;
  using Arithmetic = Exact;
};

template <>
struct Form<f32, Grouped> {
  using Weights = Grouped;
  using Value = float;
  using Arithmetic = Wide;
};

// Weights of linears that round their values to 8 bits.
struct Rounding : Grouped {
  using Grouped::Grouped;
};

template <class T>
struct Form<T, Rounding> {
  using Weights = Rounding;
  using Value = float;
  using Arithmetic = Bytes;
};
