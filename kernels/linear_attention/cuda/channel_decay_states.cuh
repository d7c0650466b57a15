// What a segment adds to the state, from its last token to its first: S = Σ_j b̃_j c_jᵀ, b̃_j = b_j α_{j+1} ⋯ α_last.
//
// So the state in the accumulators never decays: each channel has the product of all decays of later tokens, and b is
// multiplied by it. A warp owns 16 channels of b and all of the slice's of c. Of b and its decays nothing is computed
// twice, and b̃ stays in registers, as the left operand of the product. Copies are STAGES − 1 chunks ahead.
#pragma once
#include "channel_decay_params.cuh"

template <typename G, int BD, int M>
struct SharedStates {  // byte offsets in a stage, which has the gates, b and c of a chunk
  static constexpr int GATES = 0;
  static constexpr int B = GATES + SpreadTile<BD, Bytes<G>::N>::SIZE;
  static constexpr int C = B + SpreadTile<BD>::SIZE;
  static constexpr int STAGE = C + SpreadTile<M>::SIZE;
};

template <typename T, typename G, int BD, int M, bool REVERSE, int STAGES>
struct SegmentStates {
  using Shared = SharedStates<G, BD, M>;
  static constexpr int THREADS = 2 * BD;

  const ChannelParams& p;
  ChannelBlock<T, G, REVERSE> block;
  float state[M / 8][4] = {};   // S, 8 columns each
  float later[2] = {1.f, 1.f};  // the decay of all later tokens, of channels g and g + 8

  DEVICE SegmentStates(const ChannelParams& params, char* shared) : p(params), block(params, shared, blockIdx.z) {}
  DEVICE int slice() const { return blockIdx.x * M; }
  DEVICE int own() const { return block.tid / 32 * 16; }  // the warp's first channel of b
  DEVICE u32 stage(int chunk) const { return block.base + u32(chunk) % STAGES * Shared::STAGE; }

  DEVICE void load(int chunk) const {
    const int row = chunk * CHANNEL_CHUNK;
    const u32 to = stage(chunk);
    block.template load_gates<BD, THREADS, SpreadTile<BD, Bytes<G>::N>>(to + Shared::GATES, 0, row);
    block.template load<BD, THREADS, SpreadTile<BD>>(to + Shared::B, p.b, p.strides_b, row);
    block.template load<M, THREADS, SpreadTile<M>>(to + Shared::C, p.c + slice(), p.strides_c, row);
  }

  // A lane has tokens 8t … 8t+7 of a chunk, t = lane % 4, so that it knows most of its decays to the end itself: of the
  // chunk's two products it takes 8t+4s … 8t+4s+3 in product s. Their sum is the same in any order of the tokens.
  // This is the address of the row and the half of 16 columns that a lane gives to ldmatrix, for s = 0.
  template <typename TILE>
  DEVICE u32 lanes(u32 tile, int column) const {
    const int lane = block.tid % 32;
    return tile + TILE::at(lane % 8 / 2 * 8 + lane % 2 + lane / 16 * 2, column + lane / 8 % 2 * 8);
  }

  // Decays of channels g and g + 8, g = lane / 4, of this lane's tokens.
  DEVICE void decays(float (&alpha)[2][8], u32 gates) const {
    using Gates = SpreadTile<BD, Bytes<G>::N>;
    if constexpr (Bytes<G>::N == 4) {
      const int lane = block.tid % 32;
      const u32 from = gates + Gates::at(lane % 4 * 8, own() + lane / 4);
#pragma unroll
      for (int j = 0; j < 8; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) alpha[i][j] = __uint_as_float(ld_shared_b32(from + j * Gates::ROW + 32 * i));
    } else {
      const u32 from = lanes<Gates>(gates, own());
#pragma unroll
      for (int s = 0; s < 2; s++) {
        u32 x[4];
        ldmatrix_trans(x, from + 4 * s * Gates::ROW);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float2 pair = unpack<G>(x[i]);
          alpha[i % 2][4 * s + i / 2 * 2] = pair.x, alpha[i % 2][4 * s + i / 2 * 2 + 1] = pair.y;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < 8; j++) alpha[i][j] = power_of_two(alpha[i][j] * LOG2_E);
  }

  // The product of all decays after a lane's tokens; `all_later`, those after the chunk, gets the chunk's own.
  DEVICE float after(const float (&alpha)[8], float& all_later) const {
    const int t = block.tid % 4;
    const float these = alpha[0] * alpha[1] * (alpha[2] * alpha[3]) * (alpha[4] * alpha[5] * (alpha[6] * alpha[7]));
    const float neighbour = __shfl_xor_sync(FULL_WARP, these, 1);
    const float two = these * neighbour, others = __shfl_xor_sync(FULL_WARP, two, 2);
    const float result = all_later * (t & 2 ? 1.f : others) * (t & 1 ? 1.f : neighbour);
    all_later *= two * others;
    return result;
  }

  // The left operands b̃ of both products.
  DEVICE void weigh(u32 (&b)[2][4], u32 from) {
    float alpha[2][8], to_end[2];
    const u32 b_tile = lanes<SpreadTile<BD>>(from + Shared::B, own());
#pragma unroll
    for (int s = 0; s < 2; s++) ldmatrix_trans(b[s], b_tile + 4 * s * SpreadTile<BD>::ROW);
    decays(alpha, from + Shared::GATES);
#pragma unroll
    for (int i = 0; i < 2; i++) to_end[i] = after(alpha[i], later[i]);
#pragma unroll
    for (int s = 1; s >= 0; s--)
#pragma unroll
      for (int i = 3; i >= 0; i--) {
        const int c = i % 2, j = 4 * s + i / 2 * 2;
        const float2 x = unpack<T>(b[s][i]);
        const float hi = x.y * to_end[c];
        to_end[c] *= alpha[c][j + 1];
        b[s][i] = pack<T>(x.x * to_end[c], hi);
        to_end[c] *= alpha[c][j];
      }
  }

  DEVICE void add(int chunk) {
    const u32 from = stage(chunk);
    u32 b[2][4];
    weigh(b, from);
    const u32 c_tile = lanes<SpreadTile<M>>(from + Shared::C, 0);
#pragma unroll
    for (int s = 0; s < 2; s++)
#pragma unroll
      for (int n = 0; n < M / 16; n++) {
        u32 c[4];
        ldmatrix_trans(c, c_tile + 4 * s * SpreadTile<M>::ROW + 32 * n);
        mma<T>(state[2 * n], b[s][0], b[s][1], b[s][2], b[s][3], c[0], c[2]);
        mma<T>(state[2 * n + 1], b[s][0], b[s][1], b[s][2], b[s][3], c[1], c[3]);
      }
  }

  DEVICE void store() const {
    const int lane = block.tid % 32, g = lane / 4, t = lane % 4, V = p.channels;
    const i64 after = block.state_after();
    float* S = p.states + after * (i64(BD) * V) + slice() + 2 * t;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int channel = own() + g + 8 * i;
#pragma unroll
      for (int n = 0; n < M / 8; n++)
        *reinterpret_cast<float2*>(S + i64(channel) * V + 8 * n) = make_float2(state[n][2 * i], state[n][2 * i + 1]);
      if (t == 0 && slice() == 0) p.decays[after * BD + channel] = later[i];
    }
  }

  DEVICE void run() {
    const int last = (block.length - 1) / CHANNEL_CHUNK;
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
      if (i <= last) load(last - i);
      copy_async_commit();
    }
#pragma unroll 1
    for (int chunk = last; chunk >= 0; chunk--) {
      copy_async_wait<STAGES - 2>();
      __syncthreads();
      if (chunk >= STAGES - 1) load(chunk - (STAGES - 1));
      copy_async_commit();
      block.recompute_addresses();
      add(chunk);
      block.recompute_addresses();
    }
    store();
  }
};
