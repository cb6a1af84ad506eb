// The start of the CPUs at EL2, with the MMU off, and the vectors of EL2.
//
// The boot CPU has the address of the device tree in x0, or 0. Another CPU has its number there, as
// CPU_ON of PSCI passes it on. Each turns its MMU on, with memory mapped to itself, and calls Rust.

.section .boot, "ax"

.global start
start:
    mov x20, x0
    mov x21, #0                         // the number of the boot CPU
    adr x22, boot_cpu_main
    b set_up

.global start_other
start_other:
    mov x21, x0
    adr x22, other_cpu_main

set_up:
    msr daifset, #0xf
    mrs x1, CurrentEL
    cmp x1, #(2 << 2)
    b.ne no_el2
    // EL1 is AArch64; nothing else of HCR_EL2 yet. E2H is clear.
    mov x1, #(1 << 31)
    msr hcr_el2, x1
    isb
    // Traps of SVE and SME, which the hypervisor does not have, and none of floating point.
    mov x1, #0x33ff
    msr cptr_el2, x1
    // MAIR: 0, Device-nGnRE; 1, Normal, write-back, of both caches.
    mov x1, #0xff04
    msr mair_el2, x1
    // TCR: RES1; PS, as the CPU has; inner shareable, write-back; 4 KiB; T0SZ for 39 bits.
    mrs x2, id_aa64mmfr0_el1
    and x2, x2, #0xf
    mov x3, #5                          // 48 bits
    cmp x2, x3
    csel x2, x2, x3, lo
    ldr x1, =0x80803519
    orr x1, x1, x2, lsl #16
    msr tcr_el2, x1
    adrp x1, boot_table
    msr ttbr0_el2, x1
    tlbi alle2
    dsb sy
    isb
    // SCTLR: RES1, instruction cache, data cache, MMU.
    ldr x1, =0x30c51835
    msr sctlr_el2, x1
    isb
    adr x1, vectors
    msr vbar_el2, x1
    msr tpidr_el2, x21
    // The end of this CPU's stack.
    adrp x1, stacks
    add x1, x1, :lo12:stacks
    mov x2, #STACK_BYTES
    madd x1, x21, x2, x1
    add sp, x1, x2
    mov x0, x20
    mov x29, #0
    mov x30, #0
    br x22

// Only the emulator can print it, by semihosting.
no_el2:
    adr x1, no_el2_text
    mov w0, #4                          // SYS_WRITE0
    hlt #0xf000
    adr x1, no_el2_exit
    mov w0, #0x20                       // SYS_EXIT_EXTENDED
    hlt #0xf000
1:  wfi
    b 1b
.balign 8
no_el2_exit:
    .quad 0x20026, EXIT_FAILED
no_el2_text:
    .asciz "verdict error the CPU does not start at EL2: the machine has no virtualization\n"

.ltorg

// The vectors of EL2 (Arm ARM, D1.3.1 "Exception vectors"): an exception of the hypervisor is a
// defect. One of the guest is an exit.

.macro own, kind
    .balign 0x80
    mov x0, #\kind
    b exception_of_own
.endm
.macro guest, kind
    .balign 0x80
    stp x0, x1, [sp, #-16]!
    mov x1, #\kind
    b guest_exit
.endm

.text
.balign 0x800
vectors:
    own 0                               // SP_EL0, which is never in use
    own 1
    own 2
    own 3
    own 0
    own 1
    own 2
    own 3
    guest 0                             // AArch64
    guest 1
    guest 2
    guest 3
    guest 4                             // AArch32
    guest 4
    guest 4
    guest 4

exception_of_own:
    mrs x1, esr_el2
    mrs x2, elr_el2
    mrs x3, far_el2
    // Its stack begins anew: it does not come back.
    mrs x4, tpidr_el2
    adrp x5, stacks
    add x5, x5, :lo12:stacks
    mov x6, #STACK_BYTES
    madd x5, x4, x6, x5
    add sp, x5, x6
    b exception_main

// fn enter(x0: *mut Registers) -> x0: u64, the kind of the exit
//
// Exchanges the general registers for those of the guest, and returns when the guest has left. All
// others are the guest's: the hypervisor uses no floating point, and no register of EL1.
.global enter_guest
.balign 64
enter_guest:
    stp x19, x20, [sp, #-112]!
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    str x0, [sp, #96]
    ldp x1, x2, [x0, #REGISTERS_PC]
    msr elr_el2, x1
    msr spsr_el2, x2
    ldp x2, x3, [x0, #16]
    ldp x4, x5, [x0, #32]
    ldp x6, x7, [x0, #48]
    ldp x8, x9, [x0, #64]
    ldp x10, x11, [x0, #80]
    ldp x12, x13, [x0, #96]
    ldp x14, x15, [x0, #112]
    ldp x16, x17, [x0, #128]
    ldp x18, x19, [x0, #144]
    ldp x20, x21, [x0, #160]
    ldp x22, x23, [x0, #176]
    ldp x24, x25, [x0, #192]
    ldp x26, x27, [x0, #208]
    ldp x28, x29, [x0, #224]
    ldr x30, [x0, #240]
    ldp x0, x1, [x0]
    eret
    dsb nsh                             // no speculation goes on here
    isb

guest_exit:
    ldr x0, [sp, #(16 + 96)]
    stp x2, x3, [x0, #16]
    ldp x2, x3, [sp], #16
    stp x2, x3, [x0]
    stp x4, x5, [x0, #32]
    stp x6, x7, [x0, #48]
    stp x8, x9, [x0, #64]
    stp x10, x11, [x0, #80]
    stp x12, x13, [x0, #96]
    stp x14, x15, [x0, #112]
    stp x16, x17, [x0, #128]
    stp x18, x19, [x0, #144]
    stp x20, x21, [x0, #160]
    stp x22, x23, [x0, #176]
    stp x24, x25, [x0, #192]
    stp x26, x27, [x0, #208]
    stp x28, x29, [x0, #224]
    str x30, [x0, #240]
    mrs x2, elr_el2
    mrs x3, spsr_el2
    stp x2, x3, [x0, #REGISTERS_PC]
    mov x0, x1
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp x19, x20, [sp], #112
    ret

// The page table of EL2, of 1 GiB blocks (Arm ARM, D8.3.2 "Block descriptor and Page descriptor
// formats"): devices below 1 GiB, never executed; the first GiB of memory. Rust adds more memory.
.data
.balign 4096
.global boot_table
boot_table:
    .quad (1 << 54) | (1 << 10) | (1 << 6) | 1
    .quad 0x40000000 | (1 << 10) | (3 << 8) | (1 << 6) | (1 << 2) | 1
    .fill 510, 8, 0

.bss
.balign 4096
// A table of stage 2 that maps nothing.
.global empty_table
empty_table:
    .fill 512, 8, 0
.balign 16
.global stacks
stacks:
    .fill STACK_BYTES * MAX_CPUS, 1, 0
