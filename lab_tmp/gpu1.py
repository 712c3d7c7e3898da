import os, json, sys, time, torch, math
L=os.path.dirname(os.path.abspath(__file__)); sys.path.insert(0,L)
from unet import *; from solver import *
OUT=os.environ['OUT']; T0=time.time(); LIMIT=float(sys.argv[1]); left=lambda: LIMIT-(time.time()-T0)
torch.manual_seed(0); dev='cuda'; R={}
def save(): json.dump(R,open(OUT+'/lab1.json','w'),indent=0)
ck='/tmp/deeppcr_ddpm_cifar.pt'; net=big().to(dev)
if os.path.exists(ck): net.load_state_dict(torch.load(ck)); net.eval(); print('loaded')
else:
    torch.backends.cudnn.benchmark=True
    data=cifar(sys.argv[2]); n,l=train(net,data,80,128,2e-4,dev,True); torch.save(net.state_dict(),ck); print('trained',n,l,flush=True)
    torch.backends.cudnn.benchmark=False
net.requires_grad_(False)
def prec(p):
    torch.backends.cuda.matmul.allow_tf32=torch.backends.cudnn.allow_tf32=(p!='float32')
class Cap:
    def __init__(s,p,rows):
        s.rows=rows; s.x=torch.randn(rows,3,32,32,device=dev); s.t=torch.zeros(rows,dtype=torch.long,device=dev); prec(p)
        def call():
            with torch.autocast('cuda',torch.bfloat16,enabled=p=='bf16',cache_enabled=False): return net(s.x,s.t).sample.float()
        st=torch.cuda.Stream(); st.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(st):
            for _ in range(2): call()
        torch.cuda.current_stream().wait_stream(st); s.g=torch.cuda.CUDAGraph()
        with torch.cuda.graph(s.g): s.o=call()
    def __call__(s,x,t):
        m=len(x); s.x[:m]=x; s.t[:m]=t; s.g.replay(); return s.o[:m].clone()
    def ms(s):
        ts=[]
        for _ in range(6):
            a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True); a.record(); s.g.replay(); b.record(); b.synchronize(); ts.append(a.elapsed_time(b))
        return sorted(ts)[2]
caps={}
def cap(p,r):
    if (p,r) not in caps: caps[p,r]=Cap(p,r)
    return caps[p,r]
with torch.no_grad():
    R['cost']={}
    for p in ('float32','tf32','bf16'):
        R['cost'][p]={}; 
        for r in (1,2,4,8,16,24,32,48,64,128,256):
            t=time.time(); R['cost'][p][r]=cap(p,r).ms(); R['cost'][p][f'cap{r}']=time.time()-t
        print(p,{k:round(v,2) for k,v in R['cost'][p].items() if not str(k).startswith('cap')}, 'capture s',{k:round(v,2) for k,v in R['cost'][p].items() if str(k).startswith('cap')},flush=True)
    print('mem',torch.cuda.memory_reserved()/2**30); save()
    ref={}; z0=torch.randn(1,3,32,32,device=dev); noise=torch.randn(1000,3,32,32,device=dev)
    def job(k,l): return coeffs(k,l,dev),(noise[:l] if k=='ddpm' else None)
    for k,l in (('ddim',50),('ddim',100),('ddpm',1000)):
        c,n=job(k,l)
        for p in ('float32','tf32','bf16'):
            ref[k,l,p]=loop(cap(p,1),c,z0,n)[-1]
            if p!='float32' or l<1000:
                d=(loop(cap(p,2),c,z0,n,2)[-1]-ref[k,l,p]).abs().max().item(); d2=(loop(cap(p,32),c,z0,n,32)[-1]-ref[k,l,p]).abs().max().item() if l<1000 or p=='bf16' else -1
                print(k,l,p,'loop to itself in 2 rows %.1e 32 rows %.1e to float32 %.1e'%(d,d2,(ref[k,l,p]-ref[k,l,'float32']).abs().max()),flush=True); R[f'self {k} {l} {p}']=(d,d2)
    rows=[]
    def go(k,l,p,**kw):
        if left()<8: return
        c,n=job(k,l); W=min(kw['W'],l)
        t=time.time(); r=Run(cap(p,W),c,z0,n,**kw); z=r(maxit=1500); torch.cuda.synchronize(); t=time.time()-t
        e=(z.flatten()-ref[k,l,p]).abs().max().item(); x=r.rows/l; est=r.its*R['cost'][p].get(W,caps[p,W].ms())
        rows.append((k,l,p,kw,x,r.its,e,est)); print(k,l,p,kw,'rows/L %.2f its %d err %.1e est %.0f ms gain %.2f'%(x,r.its,e,est,R['cost'][p][1]*l/est),flush=True)
        R['runs']=[list(map(str,a)) for a in rows]; save(); return x
    for W in (8,16,32,64):
        for accel in ('anderson','secant','both',None):
            for crit in ('rate','update'):
                for prior in (1.0,0.1):
                    go('ddim',100,'float32',W=W,accel=accel,crit=crit,prior=prior,hold='scaled')
        for hold in (False,'hold','linear'): go('ddim',100,'float32',W=W,accel='secant',crit='rate',hold=hold)
        go('ddim',100,'float32',W=W,accel='anderson',crit='rate',hold=False)
    for W in (32,64,128):
        for accel in ('anderson','secant','both'):
            for growth in (10.,):
                go('ddpm',1000,'tf32',W=W,accel=accel,crit='rate',hold='scaled',tol=4e-3,growth=growth)
    for W in (32,64): go('ddpm',1000,'float32',W=W,accel='secant',crit='rate',hold='scaled')
    go('ddpm',1000,'float32',W=64,accel='anderson',crit='rate',hold='scaled')
    go('ddpm',1000,'float32',W=64,accel='anderson',crit='update',hold=False)
    for f in (.2,): go('ddpm',1000,'float32',W=64,accel='secant',crit='rate',hold='scaled',freeze=f,growth=10.)
    for W in (16,32): go('ddpm',1000,'tf32',W=W,accel='secant',crit='rate',hold='scaled',tol=4e-3,growth=1.,freeze=.1)
    for W in (32,64): 
        for fr in (.05,.5): go('ddpm',1000,'bf16',W=W,accel='secant',crit='rate',hold='scaled',tol=2e-2,growth=1.,freeze=fr)
    for W in (8,16,32):
        for accel in ('anderson','secant'):
            go('ddim',50,'tf32',W=W,accel=accel,crit='rate',hold='scaled',tol=4e-3,growth=10.); go('ddim',100,'tf32',W=W,accel=accel,crit='rate',hold='scaled',tol=4e-3,growth=10.)
            go('ddim',50,'tf32',W=W,accel=accel,crit='rate',hold='linear',tol=4e-3,growth=10.)
print('total',time.time()-T0)
