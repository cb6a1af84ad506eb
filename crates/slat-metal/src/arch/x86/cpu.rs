//! The descriptor tables of a CPU, and its exceptions.
//!
//! The image takes no interrupts. Maskable ones are the guest's, and an NMI makes a CPU leave its
//! guest. With SVM its handler does nothing more. With VMX (CR4.VMXE, bit 13) it sets the guest's
//! preemption timer to 0, so that the next entry ends at once (`vmx::run`). Each exception is a
//! defect, and ends the machine.
//!
//! Every gate has a stack of its own (AMD APM vol. 2, 8.9.4 "Interrupt-Stack Table"): compiled code
//! uses 128 bytes below its stack pointer.

#![expect(unsafe_code, reason = "loads descriptor tables, and is entered by exceptions")]

use alloc::boxed::Box;

use spin::Once;
use x86_64::VirtAddr;
use x86_64::instructions::segmentation::{CS, DS, ES, SS, Segment};
use x86_64::instructions::tables::{load_tss, sgdt};
use x86_64::registers::control::Cr2;
use x86_64::structures::gdt::{Descriptor, GlobalDescriptorTable};
use x86_64::structures::idt::InterruptDescriptorTable;
use x86_64::structures::tss::TaskStateSegment;

use super::vmx::vmcs::Field;

/// The stack of NMIs, and that of exceptions (places in the interrupt-stack table).
const NMI_STACK: u16 = 0;
const EXCEPTION_STACK: u16 = 1;
const STACK_BYTES: usize = 16 << 10;

core::arch::global_asm!(
    "
    .macro exception vector, has_error
    .global exception_\\vector
    exception_\\vector:
    .if \\has_error == 0
        push 0
    .endif
        push \\vector
        jmp exception_common
    .endm

    .text
    exception 0, 0
    exception 1, 0
    exception 3, 0
    exception 4, 0
    exception 5, 0
    exception 6, 0
    exception 7, 0
    exception 8, 1
    exception 10, 1
    exception 11, 1
    exception 12, 1
    exception 13, 1
    exception 14, 1
    exception 16, 0
    exception 17, 1
    exception 18, 0
    exception 19, 0
    exception_common:
        cld
        mov rdi, rsp
        and rsp, -16
        call exception_main
        ud2

    .global nmi_entry
    nmi_entry:
        push rax
        mov rax, cr4
        bt eax, 13
        jnc 1f
        push rdx
        mov eax, {preemption_timer}
        xor edx, edx
        vmwrite rax, rdx
        pop rdx
    1:  pop rax
        iretq
    ",
    preemption_timer = const Field::PreemptionTimer as u32,
);

/// What the stubs and the CPU have pushed (APM vol. 2, 8.9.3 "Interrupt Stack Frame").
#[repr(C)]
struct Frame {
    vector: u64,
    error: u64,
    rip: u64,
    cs: u64,
    rflags: u64,
    rsp: u64,
    ss: u64,
}

/// Reports an exception of the image itself.
#[unsafe(no_mangle)]
extern "C" fn exception_main(frame: &Frame) -> ! {
    let Frame { vector, error, rip, rsp, .. } = frame;
    let cr2 = Cr2::read_raw();
    crate::error!("exception {vector} of the hypervisor at {rip:#x}, error {error:#x}, rsp {rsp:#x}, cr2 {cr2:#x}")
}

fn idt() -> &'static InterruptDescriptorTable {
    static IDT: Once<InterruptDescriptorTable> = Once::new();
    IDT.call_once(|| {
        let mut idt = InterruptDescriptorTable::new();
        macro_rules! gates {
            ($($gate:ident: $entry:ident on $stack:ident,)*) => {{
                unsafe extern "C" {
                    $(static $entry: u8;)*
                }
                $(
                    // SAFETY: a stub for this vector, and a stack that each CPU has.
                    unsafe {
                        idt.$gate
                            .set_handler_addr(VirtAddr::new((&raw const $entry).addr() as u64))
                            .set_stack_index($stack);
                    }
                )*
            }};
        }
        gates! {
            divide_error: exception_0 on EXCEPTION_STACK,
            debug: exception_1 on EXCEPTION_STACK,
            non_maskable_interrupt: nmi_entry on NMI_STACK,
            breakpoint: exception_3 on EXCEPTION_STACK,
            overflow: exception_4 on EXCEPTION_STACK,
            bound_range_exceeded: exception_5 on EXCEPTION_STACK,
            invalid_opcode: exception_6 on EXCEPTION_STACK,
            device_not_available: exception_7 on EXCEPTION_STACK,
            double_fault: exception_8 on EXCEPTION_STACK,
            invalid_tss: exception_10 on EXCEPTION_STACK,
            segment_not_present: exception_11 on EXCEPTION_STACK,
            stack_segment_fault: exception_12 on EXCEPTION_STACK,
            general_protection_fault: exception_13 on EXCEPTION_STACK,
            page_fault: exception_14 on EXCEPTION_STACK,
            x87_floating_point: exception_16 on EXCEPTION_STACK,
            alignment_check: exception_17 on EXCEPTION_STACK,
            machine_check: exception_18 on EXCEPTION_STACK,
            simd_floating_point: exception_19 on EXCEPTION_STACK,
        }
        idt
    })
}

fn new_stack() -> VirtAddr {
    let stack: &'static mut [u8] = Box::leak(alloc::vec![0; STACK_BYTES].into_boxed_slice());
    // The end, at a multiple of 16.
    VirtAddr::from_ptr(stack.as_ptr_range().end).align_down(16_u64)
}

/// Gives the calling CPU its descriptor tables, for good.
pub fn set_up() {
    let mut tss = Box::new(TaskStateSegment::new());
    for stack in [NMI_STACK, EXCEPTION_STACK] {
        tss.interrupt_stack_table[usize::from(stack)] = new_stack();
    }
    let gdt = Box::leak(Box::new(GlobalDescriptorTable::new()));
    let code = gdt.append(Descriptor::kernel_code_segment());
    let data = gdt.append(Descriptor::kernel_data_segment());
    let task = gdt.append(Descriptor::tss_segment(Box::leak(tss)));
    gdt.load();
    // SAFETY: selectors of the table that was loaded just now; it stays.
    unsafe {
        CS::set_reg(code);
        SS::set_reg(data);
        DS::set_reg(data);
        ES::set_reg(data);
        load_tss(task);
    }
    idt().load();
}

/// The calling CPU's task register: its selector, and the base of its segment.
pub fn task() -> (u16, u64) {
    let selector = str_selector();
    // The descriptor of a task has 16 bytes (SDM vol. 3A, "TSS Descriptor in 64-bit mode").
    let descriptor = (sgdt().base.as_u64() + u64::from(selector & !7)) as *const u64;
    // SAFETY: `set_up` has put the descriptor into the table, which stays.
    let [low, high] = unsafe { [descriptor.read(), descriptor.add(1).read()] };
    (selector, high << 32 | low >> 32 & 0xff00_0000 | low >> 16 & 0x00ff_ffff)
}

fn str_selector() -> u16 {
    let selector: u16;
    // SAFETY: reading the register changes nothing.
    unsafe { core::arch::asm!("str {:x}", out(reg) selector, options(nomem, nostack, preserves_flags)) };
    selector
}
